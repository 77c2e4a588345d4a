# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA's Multi-Process Service, by which processes run on one GPU at once, each on a share of its multiprocessors.

The control daemon changes no setting of the device and ends with the context that started it. Without it, processes
of one GPU take turns on the whole of it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu.parts import Skip

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/sbin")
"""Folders that are searched beside PATH and the ``bin`` of every folder of packages."""
ANSWER_S = 20.0
"""seconds in which the daemon has to answer a command"""


class Service:
    """A running control daemon.

    Attributes:
        environment: variables by which a process becomes its client.
        logs: folder of its logs.
    """

    def __init__(self, control: str, environment: dict[str, str]) -> None:
        self._control = control
        self.environment = environment
        self.logs = Path(environment[LOGS])

    def share(self, percent: int) -> dict[str, str]:
        """Return the variables of a client that gets ``percent`` of the multiprocessors."""
        return {**self.environment, SHARE: str(percent)}

    def command(self, words: str) -> str:
        """Send a command to the daemon and return its answer.

        Raises:
            subprocess.SubprocessError: the daemon does not answer, or says that the command has failed.
        """
        answer = subprocess.run(
            [self._control],
            input=f"{words}\n",
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
        return answer.stdout.strip()

    def log(self, most: int = 2000) -> str:
        """Return the end of what the daemon and its server have logged, ``most`` characters of each."""
        return "\n".join(
            path.read_text(errors="replace")[-most:]
            for path in sorted(self.logs.glob("*.log"))
        )


def find_programs(folders: Sequence[str] | None = None) -> dict[str, str]:
    """Return the paths of the daemon and of its server.

    Args:
        folders: to search; by default PATH, ``PLACES``, and the ``bin`` of every folder that Python imports from.

    Raises:
        Skip: one of them is not there.
    """
    if folders is None:
        packages = [str(Path(folder, "bin")) for folder in sys.path if folder]
        folders = [*os.environ.get("PATH", "").split(os.pathsep), *PLACES, *packages]
    search = os.pathsep.join(folders)
    found = {name: shutil.which(name, path=search) for name in (CONTROL, SERVER)}
    for name, path in found.items():
        if path is None:
            raise Skip(
                f"{name} is not on PATH, nor in {', '.join(PLACES)}, nor in a folder of packages"
            )
    return {name: str(path) for name, path in found.items()}


@contextlib.contextmanager
def service(programs: dict[str, str] | None = None) -> Iterator[Service]:
    """Run the control daemon in this context; its server and its folders end with it.

    Args:
        programs: paths as ``find_programs`` returns them.

    Raises:
        Skip: the programs are not there, or the daemon does not answer; with what it has logged.
    """
    programs = find_programs() if programs is None else programs
    with tempfile.TemporaryDirectory(prefix="mps_") as folder:
        pipes = Path(folder, "pipes")
        logs = Path(folder, "logs")
        pipes.mkdir()
        logs.mkdir()
        environment = {PIPES: str(pipes), LOGS: str(logs)}
        # The daemon starts its server by name.
        path = os.pathsep.join(
            [str(Path(programs[SERVER]).parent), os.environ.get("PATH", "")]
        )
        daemon = subprocess.Popen(
            [programs[CONTROL], "-f"],
            env={**os.environ, **environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=(logs / "daemon.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        running = Service(programs[CONTROL], environment)
        try:
            _await_answer(running, daemon)
            yield running
        except BaseException:
            print(f"What the service has logged:\n{running.log()}")
            raise
        finally:
            _quit(running, daemon)


def _await_answer(running: Service, daemon: subprocess.Popen) -> None:
    """Raise Skip unless the daemon answers a question within ``ANSWER_S``."""
    reason = "it did not answer"
    for _ in range(int(ANSWER_S)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = daemon.wait(1.0)
            raise Skip(
                f"{CONTROL} ended with code {code}: {running.log() or 'it said nothing'}"
            )
        try:
            running.command("get_server_list")
            return
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{type(error).__name__}: {error}"
    raise Skip(f"{CONTROL} does not answer: {reason}; {running.log()}")


def _quit(running: Service, daemon: subprocess.Popen) -> None:
    """End the daemon and its server: clients that are left get a second, then the daemon is killed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        running.command("quit -t 1")
    try:
        daemon.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
