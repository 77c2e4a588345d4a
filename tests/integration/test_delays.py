"""No deadlock, and not a bit changed, when every step of core attention begins late by chance on every rank."""

import functools

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.compositions import CAD, COMMON, HALVED, MORE_HALVED
from tests.integration.harness import RunResult, run
from tests.integration.tick_compositions import QUICK, SLOW
from tests.runtime.threaded import needs_linux

Job = tuple[int, tuple[str, ...]]
"""Ranks and arguments."""
HALVES = "--cad.nano_batches=2"
JOBS: dict[str, Job] = {
    case.name: (case.nranks, (HALVES, *case.shared, *case.args))
    for case in [*HALVED, *MORE_HALVED]
    if TorchVersion(torch.__version__) >= case.needs_torch
}
for name, (args, shared, nranks, _, rows) in (QUICK | SLOW).items():
    if "halves" in name or name == "pp4 m4 dp1 tp1":
        JOBS[f"ticks {name}"] = nranks, (*shared, f"--training.local_batch_size={rows}", *args)
NAMES = list(JOBS)


def train(name: str, *more: str, delay_s: float = 0.0) -> RunResult:
    nranks, args = JOBS[name]
    result = run([*COMMON, *CAD, *args, *more], nranks, timeout_s=300, delay_s=delay_s)
    assert result.ok, result.report()
    return result


train_promptly = functools.cache(train)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("number", range(200))
def test_random_delays_change_nothing(number: int) -> None:
    """200 runs, of every composition in turn, over the one transport and then over the other."""
    turn, index = divmod(number, len(NAMES))
    transport = ("collective", "symm_mem")[(turn + index) % 2]
    late = train(NAMES[index], f"--cad.transport={transport}", delay_s=0.01)
    prompt = train_promptly(NAMES[index])
    assert late.losses == prompt.losses
    assert late.grad_norms == prompt.grad_norms
    assert late.validation_losses == prompt.validation_losses
