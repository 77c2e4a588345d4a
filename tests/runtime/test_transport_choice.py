# SPDX-License-Identifier: BSD-3-Clause
"""Which transport a job gets: by name, by what works on all ranks, and why not another."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.lib import cpu_memory
from tests.lib.cpu_memory import CpuMemory
from tests.lib.exchanges import CPU
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.threaded import needs_linux
from torchtitan_cad.runtime import hosts
from torchtitan_cad.runtime.transport import build
from torchtitan_cad.runtime.transport.build import build_transport, expected_transport


def choose_where_one_rank_cannot(group) -> list[str]:
    """Rank 1 may make no files in memory, say; errors of compilers derive from Exception alone."""

    def fail(*_, **__):
        raise Exception("no file in memory")

    check = build._check
    cpu_memory.install()
    if group.rank() == 1:
        build._check = fail
    lines: list[str] = []
    build._logger.info = lines.append
    assert build_transport("auto", group, CPU).name == "collective"
    with refusal("'symm_mem'", "(rank 1)", "cad.transport"):
        build_transport("symm_mem", group, CPU)
    # As on a GPU, where auto would take it: all ranks fall back together, and say why.
    build._check = check
    device = torch.device("meta")
    assert build_transport("auto", group, device).name == "collective"
    return lines


@needs_linux
def test_all_ranks_choose_the_same_transport_and_say_why():
    for lines in values(run_processes(2, choose_where_one_rank_cannot)):
        assert lines == [
            "cad.transport = 'auto': collective; not symm_mem: it needs CUDA devices",
            "cad.transport = 'auto': collective; not symm_mem: it needs CUDA devices, these are meta (rank 0)",
        ]


TRIAL = "decided at start by a trial on all ranks of the group"
CUDA = torch.device("cuda")
BETWEEN = "symm_mem inside 2 hosts, send and receive between them"
AUTO = {
    "one host": (CUDA, 1, {}, "symm_mem", TRIAL),
    "NVSHMEM is never tried": (CUDA, 2, {"nvshmem": True}, BETWEEN, TRIAL),
    "no triton": (CUDA, 2, {"triton": None}, "collective", "need the package triton"),
    "another backend": (
        CUDA,
        1,
        {"backend": "NVSHMEM"},
        "collective",
        "memory has the backend NVSHMEM, and a process",
    ),
    "FSDP2's backend": (
        CUDA,
        2,
        {"backend": "NCCL"},
        "collective",
        "such as set_symm_mem_for_comm of FSDP2",
    ),
    "async tensor parallelism": (CUDA, 2, {"backend": "CUDA"}, BETWEEN, TRIAL),
    "CPU ranks": (CPU, 2, {}, "collective", "it needs CUDA devices"),
}
"""Device, hosts, what a machine has, and what ``auto`` then means, and why."""


@pytest.fixture
def machine(monkeypatch) -> Callable[..., None]:
    """Makes this process see a machine that has these."""

    def set_up(triton=True, backend=None, nvshmem=False):
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: triton)
        monkeypatch.setattr(symm_mem, "get_backend", lambda device: backend)
        monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: nvshmem)
        monkeypatch.setattr(build, "find_device_library", lambda capability: "library")

    return set_up


@pytest.mark.parametrize("case", AUTO)
def test_what_auto_means(machine, case):
    """One process knows it, but for the trial, which takes all ranks."""
    device, num_hosts, has, expected, reason = AUTO[case]
    machine(**has)
    chosen, why = expected_transport("auto", device, num_hosts)
    assert chosen == expected
    assert reason in why


def test_what_names_mean(machine):
    machine()
    assert expected_transport("collective", CUDA, 2) == ("collective", "as set")
    assert expected_transport("symm_mem", CUDA, 1) == ("symm_mem", TRIAL)
    assert expected_transport("symm_mem", CUDA, 2) == (BETWEEN, TRIAL)
    for name, device in (("nccl", CPU), ("nvshmem", CUDA), ("symm_mem", CPU)):
        with refusal("cad.transport", name, remedy="cad.transport"):
            expected_transport(name, device, 2)
    machine(nvshmem=True)
    # all groups of a job allocate together, those inside a host too
    for num_hosts in (1, 2):
        assert expected_transport("nvshmem", CUDA, num_hosts)[0] == "nvshmem"


def choose_over_all_groups(group):
    """Two groups of two ranks; NVSHMEM lacks something on a rank of one of them."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    own = groups[group.rank() // 2]

    def check(name, device):
        if group.rank() == 3:
            raise RuntimeError("no library")

    build._check = check
    with refusal("'nvshmem'", "(rank 3)", "cad.transport"):
        build_transport("nvshmem", own, CPU)


@pytest.mark.matrix
def test_all_groups_of_a_job_agree_before_nvshmem_allocates():
    """Its allocation is collective over all ranks of the job."""
    values(run_processes(4, choose_over_all_groups))


def agree_over_another_group(group):
    """Nothing is gathered over the transport's own group, of which NCCL would make a communicator for that alone."""
    agreement = dist.new_group(backend="gloo")
    gather = dist.all_gather_object
    used = []

    def record(values, value, group):
        used.append(group)
        gather(values, value, group=group)

    cpu_memory.install()
    dist.all_gather_object = record
    transport = build_transport("symm_mem", group, CPU, agreement=agreement)
    assert transport.name == "symm_mem"
    assert agreement in used
    assert group not in used


@needs_linux
def test_ranks_agree_over_the_group_they_are_given():
    values(run_processes(2, agree_over_another_group))


def differ_in_hosts(group) -> list[str]:
    """Ranks 0 and 1 of four share a host, ranks 2 and 3 do not. Later groups have names of their own."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    rank = group.rank()
    cpu_memory.install()
    hosts = [0, rank // 2]
    transport = build_transport("symm_mem", groups[rank // 2], CPU, hosts=hosts)
    timeout = timedelta(seconds=20)
    ranks = [rank - rank % 2, rank - rank % 2 + 1]
    again = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    dist.barrier(again)
    dist.barrier(dist.new_group(timeout=timeout, backend="gloo"))
    return [transport.description]


@needs_linux
def test_groups_may_differ_in_hosts():
    near = ["symm_mem"]
    far = ["symm_mem inside 2 hosts, gloo between them"]
    assert values(run_processes(4, differ_in_hosts)) == [near, near, far, far]


def fail_at_every_step(group):
    """Rank 1 fails on its way to shared memory, the later step first, while its peer goes on to the next step."""

    def fail(*_, **__):
        raise OSError("too many files")

    cpu_memory.install()
    for owner, step in ((torch, "from_file"), (CpuMemory, "reserve")):
        if group.rank() == 1:
            setattr(owner, step, fail)
        begin = time.monotonic()
        with refusal("'symm_mem'", "OSError: too many files (rank 1)"):
            build_transport("symm_mem", group, CPU)
        assert time.monotonic() - begin < 20


@needs_linux
def test_no_rank_waits_for_one_that_cannot_share_memory():
    values(run_processes(2, fail_at_every_step))


def start_late(group, log):
    logging.basicConfig(format="%(message)s", filename=log)
    with build._ends_unless_started_in(0.2):
        time.sleep(30)


def test_a_start_that_never_ends_ends_the_process(tmp_path):
    log = tmp_path / "log"
    assert run_processes(1, start_late, str(log)) == [1]
    assert (
        "'nvshmem': NVSHMEM has not started for 0 s; set cad.transport to 'auto'"
        in log.read_text()
    )


def test_a_host_is_a_boot_and_a_name(monkeypatch, tmp_path):
    """Containers of one name on two machines are told apart, and two containers on one machine, of one name or not."""
    here = hosts.host_name()
    assert here == hosts.host_name()
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "another container")
    assert hosts.host_name() != here
    monkeypatch.undo()
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("the boot of another machine")
    monkeypatch.setattr(hosts, "_BOOT_ID", boot_id)
    assert hosts.host_name() != here
    monkeypatch.undo()
    other_processes = tmp_path / "pid"
    other_processes.symlink_to("pid:[1]")
    boot_id.rename(tmp_path / "pid:[1]")
    monkeypatch.setattr(hosts, "_PROCESSES", other_processes)
    assert hosts.host_name() != here
    monkeypatch.setattr(hosts, "_BOOT_ID", tmp_path / "none")
    assert hosts.host_name()
    assert hosts.number_hosts(["b", "a", "b", "c"]) == (0, 1, 0, 2)


def spoil_the_trial(group):
    """Rank 0's rows do not arrive: a device whose memory others cannot write to."""
    cpu_memory.install()
    if group.rank() == 0:
        CpuMemory.send = lambda self, messages, routes, begins, *signal: self.post(
            routes.receivers, *signal
        )
    with refusal("'symm_mem'", "[0] instead of [1000] (rank 1)", "cad.transport"):
        build_transport("symm_mem", group, CPU)


@needs_linux
def test_a_trial_finds_out_that_memory_is_not_shared():
    values(run_processes(2, spoil_the_trial))
