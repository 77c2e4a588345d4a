"""Inputs with one number replaced, to see what depends on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan_cad.simulation.inputs import Cluster, Rates, Settings, with_tolerance

VARIED = ("net", "node", "latency", "memory", "linear_flops", "attention_flops", "backward_flops", "tolerance")


def vary(cluster: Cluster, rates: Rates, settings: Settings, key: str, value: float) -> tuple[Cluster, Rates, Settings]:
    """Return the inputs with one number replaced.

    Raises:
        ValueError: no such key, or a value that cannot be; names both.
    """
    numbers: dict[str, Any] = {key: value}
    if key in ("net", "node", "latency", "memory"):
        return replace(cluster, **numbers), rates, settings
    if key in ("linear_flops", "attention_flops", "backward_flops"):
        return cluster, replace(rates, **numbers), settings
    if key == "tolerance":
        return cluster, rates, with_tolerance(settings, value)
    raise ValueError(f"--vary {key}: choose one of {', '.join(VARIED)}")
