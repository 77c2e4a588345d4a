# SPDX-License-Identifier: BSD-3-Clause
"""For what another thread or process does soon."""

import time
from collections.abc import Callable

_INTERVAL_S = 0.01


def eventually(condition: Callable[[], bool], timeout_s=60.0) -> bool:
    """Wait until a condition holds; returns whether it does at the end."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_INTERVAL_S)
    return condition()
