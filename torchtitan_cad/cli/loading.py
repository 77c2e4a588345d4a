"""Loads the planner for commands. Imports planning only."""

from __future__ import annotations

import sys
import threading

from torchtitan_cad.planning import warm_up

PATIENCE_S = 2.0
"""Loading takes less; beyond that the planner is being compiled, and the user is told."""


def load_planner() -> None:
    """Builds, once per installation, and loads the planner's compiled code."""
    message = "compiling the planner, once per installation: about a minute ..."
    timer = threading.Timer(PATIENCE_S, print, (message,), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        warm_up()
    finally:
        timer.cancel()
