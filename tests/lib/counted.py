# SPDX-License-Identifier: BSD-3-Clause
"""Layouts and tasks whose launches are counted."""

from torchtitan_cad.planning import AttentionShape, TokenLayout

COUNTED_SHAPE = AttentionShape(4, 2, 16, 2)
COUNTED_SEGMENTS = [
    [(0, 0, 96), (1, 0, 40)],
    [(2, 0, 70), (3, 0, 30)],
    [(4, 0, 90), (5, 0, 20)],
]
# Both ranks serve causal and unmasked tasks, for themselves and for the other one.
TASKS_OF_TWO = [
    (0, 0, 48, 0, 48, 0),
    (0, 48, 96, 48, 96, 0),
    (0, 48, 96, 0, 48, 1),
    (1, 0, 40, 0, 40, 1),
    (2, 0, 30, 0, 30, 1),
    (2, 30, 70, 30, 70, 1),
    (2, 30, 70, 0, 30, 0),
    (3, 0, 30, 0, 30, 0),
]
# So do these three, for themselves and for both others.
TASKS_OF_THREE = [
    (0, 0, 48, 0, 48, 0),
    (0, 48, 72, 48, 72, 1),
    (0, 48, 72, 0, 48, 1),
    (0, 72, 96, 72, 96, 2),
    (0, 72, 96, 0, 72, 2),
    (1, 0, 40, 0, 40, 0),
    (2, 0, 30, 0, 30, 1),
    (2, 30, 50, 30, 50, 0),
    (2, 30, 50, 0, 30, 0),
    (2, 50, 70, 50, 70, 2),
    (2, 50, 70, 0, 50, 2),
    (3, 0, 30, 0, 30, 1),
    (4, 0, 30, 0, 30, 2),
    (4, 30, 60, 30, 60, 0),
    (4, 30, 60, 0, 30, 0),
    (4, 60, 90, 60, 90, 1),
    (4, 60, 90, 0, 60, 1),
    (5, 0, 20, 0, 20, 2),
]
COUNTED = {
    2: (TokenLayout.from_segments(COUNTED_SEGMENTS[:2]), TASKS_OF_TWO),
    3: (TokenLayout.from_segments(COUNTED_SEGMENTS), TASKS_OF_THREE),
}
"""Layout and tasks by number of ranks."""
