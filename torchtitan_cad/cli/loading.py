"""Load the planner for commands."""

from __future__ import annotations

import sys

from torchtitan_cad.planning import warm_up
from torchtitan_cad.planning.placement.place import warm_up_placement


def load_planner(placement: bool = False) -> None:
    """Load the planner's compiled code, and placement's; if that has to be waited for, stderr says why."""
    load = warm_up_placement if placement else warm_up
    load(lambda line: print(line, file=sys.stderr, flush=True))
