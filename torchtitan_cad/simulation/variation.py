"""Inputs with one number replaced, to see what depends on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan_cad.simulation.inputs import Cluster, Rates, Settings, with_tolerance

OF_CLUSTER = ("net", "node", "latency", "memory")
OF_RATES = ("linear_flops", "attention_flops", "backward_flops", "memory_bandwidth", "seconds_per_step")
VARIED = (*OF_CLUSTER, *OF_RATES, "tolerance")


def vary(cluster: Cluster, rates: Rates, settings: Settings, key: str, value: float) -> tuple[Cluster, Rates, Settings]:
    """Return the inputs with one number replaced.

    Raises:
        ValueError: no such key, or a value that cannot be; names both.
    """
    numbers: dict[str, Any] = {key: value}
    if key in OF_CLUSTER:
        return replace(cluster, **numbers), rates, settings
    if key in OF_RATES:
        return cluster, replace(rates, **numbers), settings
    if key == "tolerance":
        return cluster, rates, with_tolerance(settings, value)
    raise ValueError(f"--vary {key}: choose one of {', '.join(VARIED)}")
