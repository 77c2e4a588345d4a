# SPDX-License-Identifier: BSD-3-Clause
"""Bad configurations: one clear error on every rank; and no checkpoint after an exchange that failed."""

from types import SimpleNamespace

import pytest

from tests.lib.jobs.compositions import CAD
from tests.lib.jobs.harness import run
from tests.lib.sets import params
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.runtime.errors import PeerError

IN_TICKS = [
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=CAD1F1B",
]
LLAMA4 = ["--model.name=llama4", "--model.flavor=debugmodel"]
INTERLEAVED = [
    *(
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=CADInterleaved1F1B",
    ),
    *(
        f"--parallelism.pipeline_parallel_{which}_stage_less_layers=0"
        for which in ("first", "last")
    ),
]
REFUSED = {
    "unknown kernel": (["--cad.kernel=warp"], "cad.kernel", "warp"),
    "indivisible heads": (
        ["--parallelism.tensor_parallel_degree=2", "--model.flavor=tiny_sdpa_3_heads"],
        "parallelism.tensor_parallel_degree",
        2,
    ),
    "ticks and experts": (
        [*IN_TICKS, *LLAMA4],
        "parallelism.pipeline_parallel_schedule",
        "CAD1F1B",
    ),
    "ticks and too many stages": (
        [*IN_TICKS, "--parallelism.pipeline_parallel_layers_per_stage=1"],
        "pipeline_parallel_layers_per_stage",
        1,
    ),
    "more stages than layers": (INTERLEAVED, "parallelism.pipeline_parallel_degree", 2),
}
"""The first is found when the config is read, which test_mistakes.py shows of many more, others with the model."""


@pytest.mark.parametrize("name", params(REFUSED, ["indivisible heads"]))
def test_bad_configuration_is_one_value_error_on_every_rank(name):
    args, key, value = REFUSED[name]
    result = run([*CAD, *args], nranks=2, timeout_s=120, may_fail=True)
    result.assert_refused(key, value)


class Checkpointer:
    """Saves every third step."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step or curr_step % 3 == 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if self._should_save(curr_step, last_step):
            self.saved.append(curr_step)


def test_no_checkpoint_is_made_after_an_exchange_that_failed_unnoticed(monkeypatch):
    enable_cpu()
    from torchtitan_cad.integration import failure

    looked_at: list[int] = []

    def confirm() -> None:
        looked_at.append(step)
        if step > 5:
            raise PeerError("rank 1 has not sent its rows")

    monkeypatch.setattr(
        failure, "current_session", lambda: SimpleNamespace(confirm_exchanges=confirm)
    )
    checkpointer = Checkpointer()
    failure.check_before_saving(checkpointer)
    for step in range(1, 6):
        checkpointer.save(step)
    step = 6
    with pytest.raises(PeerError):
        checkpointer.save(step)
    step = 7
    with pytest.raises(PeerError):
        checkpointer.save(step, last_step=True)
    assert looked_at == [3, 6, 7]
    assert checkpointer.saved == [3]
