# SPDX-License-Identifier: BSD-3-Clause
"""A process ends in order when told to, even while blocked outside of Python; and the launcher's last line."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from unittest import mock

import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from torchtitan_cad import launch
from torchtitan_cad.runtime.signals import ending_on_signals

BLOCKED = """
    import ctypes, multiprocessing, os, sys, time
    from torchtitan_cad.runtime.signals import ending_on_signals

    def before_end(name):
        print("got", name, flush=True)
        time.sleep({end_s})
        print("done", flush=True)

    mutex = ctypes.create_string_buffer(128)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    with ending_on_signals(before_end, 1.0, {parent}):
        {extra}
        print("ready", flush=True)
        lock(mutex)
        lock(mutex)  # for ever, and no signal interrupts it
"""


def blocked(end_s: float = 0.0, parent: int | str = 0, extra: str = "pass") -> str:
    return textwrap.dedent(BLOCKED.format(end_s=end_s, parent=parent, extra=extra))


def start(code, *lines: str) -> subprocess.Popen:
    """A process that has printed these lines, and that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert [process.stdout.readline() for _ in (*lines, "ready")] == [
        f"{line}\n" for line in (*lines, "ready")
    ]
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_end_of_a_blocked_process(number):
    process = start(blocked())
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert said == f"got {number.name}\ndone\n"
    assert process.returncode == 128 + number


def test_end_of_the_parent_counts_as_sigterm():
    code = blocked(parent="os.getppid()")
    process = start(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    )
    process.kill()
    said, _ = process.communicate(timeout=60)
    assert said == "got SIGTERM\ndone\n"


def test_time_before_the_end_is_bounded():
    process = start(blocked(end_s=60))
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert said == "got SIGTERM\n"
    assert 0.9 < time.monotonic() - begin < 30


def test_signal_of_a_forked_child_is_its_own():
    child = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))"
    kill = f"child = {child}; child.start(); time.sleep(0.5); child.terminate(); child.join()"
    process = start(
        blocked(extra=f"{kill}; print(child.exitcode, flush=True)"),
        str(-signal.SIGTERM.value),
    )
    time.sleep(0.2)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_handlers_are_put_back():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [*map(signal.getsignal, numbers)]
    with ending_on_signals(lambda name: None, limit_s=1.0):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [*map(signal.getsignal, numbers)] == before
    assert signal.set_wakeup_fd(-1) == -1


OWN = """
    import os, signal, time
    from torchtitan_cad.runtime.signals import ending_on_signals

    signal.signal(signal.SIGTERM, lambda *_: print("preempted", flush=True))
    with ending_on_signals(lambda name: print("got", name, flush=True), 1.0):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(1)
"""


def test_a_signal_with_a_handler_of_the_programs_own_is_left_to_it():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OWN)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "preempted\ngot SIGINT\n"
    assert done.returncode == 128 + signal.SIGINT


LEFT = """
    import ctypes, multiprocessing, os, sys, time
    from torchtitan_cad.runtime.signals import end_at_once, ending_on_signals

    with ending_on_signals(lambda name: None, limit_s=60.0):
        {inside}
    print("left", flush=True)
    {after}
"""


def run(inside: str, after: str = "pass", limit_s: float = 30) -> tuple[int, list[str]]:
    """Exit code and lines of a process, whose output ends once whatever it has started and left has ended, too."""
    code = textwrap.dedent(LEFT.format(inside=inside, after=after))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.splitlines()


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.PyDLL(None).fork()"])
def test_context_ends_while_a_forked_child_lives(fork):
    """Code that is not Python's may have forked it."""
    assert run(
        f"child = {fork}; child or time.sleep(600)", after="os.kill(child, 9)"
    ) == (0, ["left"])


DAEMON = (
    "child = multiprocessing.get_context({!r}).Process("
    "target=time.sleep, args=(600,), daemon=True); child.start(); "
)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_that_ends_at_once_ends_its_daemons(method):
    """They would hold its output open, and its connections."""
    assert run("pass", after=DAEMON.format(method) + "end_at_once(3)") == (3, ["left"])


def test_forked_daemon_ends_with_a_parent_that_is_killed():
    assert run(DAEMON.format("fork") + "os.kill(os.getpid(), 9)") == (
        -signal.SIGKILL,
        [],
    )


JOB = ["-m", "torchtitan_cad.train"]
FIRST = "rank 1 (pid 101) was the first to end, with "


def failures(*exit_codes: int) -> ChildFailedError:
    failed = {
        rank: ProcessFailure(rank, 100 + rank, code, "<N/A>")
        for rank, code in enumerate(exit_codes)
    }
    return ChildFailedError("job", failed)


@pytest.mark.parametrize(
    ("error", "returncode", "said"),
    [
        (failures(143, -9, 1), 137, f"{FIRST}SIGKILL"),
        (failures(143, 1), 1, f"{FIRST}exit code 1"),
        (SignalException("", signal.SIGINT), 130, "SIGINT has ended all ranks"),
    ],
)
def test_failed_job_ends_in_one_line(error, returncode, said, monkeypatch, capsys):
    monkeypatch.setattr(torchrun, "run", mock.Mock(side_effect=error))
    assert launch.main(JOB) == returncode
    assert capsys.readouterr().err == f"launch: {said}\n"


@pytest.mark.parametrize("devices", ["gpu", "gpus"])
def test_devices_that_are_not_there_are_one_line(devices, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.main([f"--nproc_per_node={devices}", *JOB]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"launch: --nproc_per_node={devices}: ")
    assert "set it to the number of ranks" in line


@pytest.mark.parametrize(
    ("option", "folder"),
    [("--tee=3", None), ("--log-dir=mine", "mine"), ("--tee=0", "own")],
)
def test_job_that_succeeds_is_quiet_and_a_folder_that_is_not_redirected_to_is_removed(
    option, folder, monkeypatch, capsys
):
    runs = []

    def run(options):
        runs.append((options, os.path.isdir(options.log_dir or "")))

    monkeypatch.setattr(torchrun, "run", run)
    assert launch.main(["--nproc_per_node=3", option, "-m", "job", "--key=1"]) == 0
    ((options, existed),) = runs
    assert (options.nproc_per_node, options.training_script_args) == ("3", ["--key=1"])
    assert capsys.readouterr().err == ""
    if folder == "own":
        assert existed
        assert not os.path.exists(options.log_dir)
    else:
        assert options.log_dir == folder
