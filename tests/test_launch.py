"""The launcher's last line and exit code."""

import os
import signal

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan_cad import launch


def failures(*exit_codes: int) -> ChildFailedError:
    return ChildFailedError("job", {r: ProcessFailure(r, 100 + r, code, "<N/A>") for r, code in enumerate(exit_codes)})


@pytest.mark.parametrize(
    ("error", "returncode", "line"),
    [
        (failures(-15, 2), 2, "launch: rank 1 (pid 101) was the first to end, with exit code 2"),
        (failures(143, -9, 1), 137, "launch: rank 1 (pid 101) was the first to end, with SIGKILL"),
        (failures(143, 1), 1, "launch: rank 1 (pid 101) was the first to end, with exit code 1"),
        (SignalException("", signal.SIGINT), 130, "launch: SIGINT has ended all ranks"),
    ],
)
def test_failed_job_ends_in_one_line(error: Exception, returncode: int, line: str, monkeypatch, capsys) -> None:
    def fail(args: object) -> None:
        raise error

    monkeypatch.setattr(run, "run", fail)
    assert launch.main(["--nproc_per_node=2", "-m", "torchtitan_cad.train"]) == returncode
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    ("option", "folder"), [("--tee=3", None), ("--redirects=3", None), ("--log-dir=mine", "mine"), ("--tee=0", "own")]
)
def test_job_that_succeeds_is_quiet_and_a_folder_that_is_not_redirected_to_is_removed(
    option: str, folder: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []
    monkeypatch.setattr(run, "run", lambda options: given.append((options, os.path.isdir(options.log_dir or ""))))
    assert launch.main(["--nproc_per_node=3", option, "-m", "job", "--key=1"]) == 0
    ((options, existed),) = given
    assert (options.nproc_per_node, options.training_script_args) == ("3", ["--key=1"])
    assert capsys.readouterr().err == ""
    if folder == "own":
        assert existed
        assert not os.path.exists(options.log_dir)
    else:
        assert options.log_dir == folder
