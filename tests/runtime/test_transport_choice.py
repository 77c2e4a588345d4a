# SPDX-License-Identifier: BSD-3-Clause
"""Which transport a job gets: by name, by what works on all ranks, and why not another."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.runtime.exchanges import CPU
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_linux
from torchtitan_cad.runtime.transport import build, build_transport, expected_transport
from torchtitan_cad.runtime.transport.memory import CpuMemory


@pytest.mark.parametrize("name", ["auto", "collective"])
def test_only_symmetric_memory_can_be_captured(name: str) -> None:
    message = f"cad.transport = '{name}' cannot be captured in CUDA graphs: build 'symm_mem'"
    with pytest.raises(ValueError, match=message):
        build_transport(name, None, CPU, replayable=True)


def choose_where_one_rank_cannot(group: dist.ProcessGroup, error: type[Exception]) -> list[str]:
    """Rank 1 may make no files in memory, say."""

    def fail(*_: object) -> None:
        raise error("no file in memory")

    if group.rank() == 1:
        build._check = fail
    lines: list[str] = []
    build._logger.info = lines.append
    assert build_transport("auto", group, CPU).name == "collective"
    with pytest.raises(ValueError, match=r"'symm_mem' does not work here: (\w+: )?no file in memory \(rank 1\); set"):
        build_transport("symm_mem", group, CPU)
    # As on a GPU, where auto would take it: all ranks fall back together, and say why.
    device = torch.device("meta")
    assert build_transport("auto", group, device).name == "collective"
    return lines


class CompilerError(Exception):
    """Triton's and CUTLASS's own errors derive from Exception alone, too."""


@needs_linux
@pytest.mark.parametrize("error", [RuntimeError, CompilerError])
def test_all_ranks_choose_the_same_transport_and_say_why(error: type[Exception]) -> None:
    for lines in values(run_processes(2, choose_where_one_rank_cannot, error)):
        assert lines == [
            "cad.transport = 'auto': collective; not symm_mem: for ranks on CPU it serves tests",
            "cad.transport = 'auto': collective; not symm_mem: it needs CUDA devices, these are meta (rank 0)",
        ]


def agree_over_another_group(group: dist.ProcessGroup) -> None:
    """Nothing is gathered over the transport's own group, of which NCCL would make a communicator for that alone."""
    agreement, gather, used = dist.new_group(backend="gloo"), dist.all_gather_object, []

    def record(values: list[object], value: object, group: dist.ProcessGroup) -> None:
        used.append(group)
        gather(values, value, group=group)

    dist.all_gather_object = record
    assert build_transport("symm_mem", group, CPU, agreement=agreement).name == "symm_mem"
    assert used
    assert all(each is agreement for each in used)


@needs_linux
def test_ranks_agree_over_the_group_they_are_given() -> None:
    values(run_processes(2, agree_over_another_group))


def test_one_process_knows_what_the_group_will_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is left out, which takes all ranks."""
    cuda, trial = torch.device("cuda"), "decided at start by a trial on all ranks of the group"
    monkeypatch.setattr(build, "_check", lambda *_, **__: None)
    assert expected_transport("auto", cuda, 1) == expected_transport("symm_mem", CPU, 1) == ("symm_mem", trial)
    assert expected_transport("auto", CPU, 1) == ("collective", "not symm_mem: for ranks on CPU it serves tests")
    assert expected_transport("collective", cuda, 2) == ("collective", "as set")
    monkeypatch.undo()
    monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(build, "find_device_library", lambda capability: None)
    assert expected_transport("auto", cuda, 2) == ("symm_mem", trial)
    name, reason = expected_transport("auto", cuda, 2, sole_user=False)
    assert name == "collective"
    assert "parallelism.enable_async_tensor_parallel uses too: set that to false" in reason
    monkeypatch.setattr(symm_mem, "get_backend", lambda _: "NVSHMEM")
    name, reason = expected_transport("auto", cuda, 1)
    assert name == "collective"
    assert "set to the backend NVSHMEM" in reason
    with pytest.raises(ValueError, match=r"cad.transport = 'symm_mem' does not work here: ranks on CPU share memory"):
        expected_transport("symm_mem", CPU, 2)
    with pytest.raises(ValueError, match=r"cad.transport = 'nccl': set cad.transport to one of auto, symm_mem"):
        expected_transport("nccl", CPU, 1)


def test_containers_of_one_name_on_two_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.socket, "gethostname", lambda: "container")
    here = build._host()
    assert here == build._host()
    monkeypatch.setattr(build.Path, "read_text", lambda _: "the boot of another host")
    assert build._host() != here


def spoil_the_trial(group: dist.ProcessGroup) -> bool:
    """Rank 0's rows do not arrive: a device whose memory others cannot write to."""
    if group.rank() == 0:
        CpuMemory.send = lambda self, messages, routes, begins, *signal: self.post(routes.receivers, *signal)
    message = r"does not work here: a trial brought \[0\] instead of \[1000\] \(rank 1\); set"
    with pytest.raises(ValueError, match=message):
        build_transport("symm_mem", group, CPU)
    return True


@needs_linux
def test_a_trial_finds_out_that_memory_is_not_shared() -> None:
    assert values(run_processes(2, spoil_the_trial)) == [True, True]
