# SPDX-License-Identifier: BSD-3-Clause
"""How exact results are, by the measure of an independent computation of the same formula in the same precision.

How much rounding costs depends on the machine, as matrix libraries sum in orders of their own: a bound in digits fits
one machine. The error of another computation, on the same machine and the same numbers, is a bound on all of them.
"""

import math

import torch

FACTOR = 2.0
FLOORS = {"rms": 1.0, "worst row's": 16.0}
"""Roundings that are always allowed, for where the other computation happens to hit the exact numbers."""


def errors_of(result, reference) -> tuple[float, float]:
    """Relative errors of a tensor in roundings, which are units of its dtype's eps: of all values together, and the
    largest of a row (along dim 0), over the largest norm of a row of the reference.

    Where the reference is infinite the result must be, with the same sign; a reference of zeros allows no error."""
    assert result.shape == reference.shape
    want, got = (
        x.detach().double().flatten(1) if x.dim() > 1 else x.detach().double()
        for x in (reference, result)
    )
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), "infinite values differ"
    want, got = (x.masked_fill(infinite, 0) for x in (want, got))
    difference = got - want
    assert difference.isfinite().all(), "a value is not finite"
    if not difference.any():
        return 0.0, 0.0
    if not want.any():
        return math.inf, math.inf
    rows, want_rows = (x if x.dim() == 1 else x.norm(dim=1) for x in (difference, want))
    eps = torch.finfo(result.dtype).eps
    of_all = float(rows.norm() / want_rows.norm()) / eps
    return of_all, float(rows.abs().max() / want_rows.abs().max()) / eps


def assert_as_exact(result, independent, reference, name=""):
    """Asserts that a result errs at most twice as much as an independent computation, or by a few roundings.

    Args:
        independent: the same formula computed otherwise. Its dtype may differ from the result's; errors are compared in
            roundings of each.
        reference: the same in fp64, [shape of both].
        name: of what is compared, for the message.
    """
    errors = errors_of(result, reference)
    others = errors_of(independent, reference)
    # A reference in the result's own precision errs as much as the independent computation.
    factor = FACTOR if result.dtype != reference.dtype else FACTOR + 1
    for (kind, floor), error, bound in zip(FLOORS.items(), errors, others, strict=True):
        assert error <= factor * bound + floor, (
            f"{name}: {kind} error of {error:.2f} roundings, the independent computation's is {bound:.2f}"
        )
