"""Loads the planner for commands."""

from __future__ import annotations

import sys

from torchtitan_cad.planning import warm_up


def load_planner() -> None:
    """Loads the planner's compiled code; if that has to be waited for, stderr says why."""
    warm_up(lambda line: print(line, file=sys.stderr, flush=True))
