# SPDX-License-Identifier: BSD-3-Clause
"""A layout and tasks whose launches are counted."""

from torchtitan_cad.planning import AttentionShape, TokenLayout

COUNTED_SHAPE = AttentionShape(4, 2, 16, 2)
_LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 96), (1, 0, 40)], [(2, 0, 70), (3, 0, 30)]]
)
# Both ranks serve causal and unmasked tasks, for themselves and for the other one.
_TASKS = [
    (0, 0, 48, 0, 48, 0),
    (0, 48, 96, 48, 96, 0),
    (0, 48, 96, 0, 48, 1),
    (1, 0, 40, 0, 40, 1),
    (2, 0, 30, 0, 30, 1),
    (2, 30, 70, 30, 70, 1),
    (2, 30, 70, 0, 30, 0),
    (3, 0, 30, 0, 30, 0),
]
COUNTED = _LAYOUT, _TASKS
"""Layout and tasks of two ranks."""
