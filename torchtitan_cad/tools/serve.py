# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad serve``: an attention server for a job with ``cad.servers``."""

import logging
import os
import signal
from pathlib import Path
from typing import Literal


def run(
    *,
    join: str,
    token: str | None = None,
    token_file: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
) -> None:
    """Compute attention for a training job with cad.servers, and for the next one at the same place, until SIGTERM.

    Needs torch and this package, no torchtitan and no model. The link to the job is not encrypted.

    Args:
        join: HOST:PORT at which the job takes servers, as it logs.
        token: That the job logs.
        token_file: A file with the token, which the command line then does not show.
        device: Where to compute.
        threads: Threads of a CPU server. By default as many as cores.
    """
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--join {join}: give HOST:PORT, as the job logs it")
    if (token is None) == (token_file is None):
        raise ValueError(
            f"--token {token}, --token-file {token_file}: give one of them, with the token that the job logs"
        )
    if token_file is not None:
        token = token_file.read_text().strip()
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads}: give a positive number")

    # A job's end closes its store, of which torch would print stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from torchtitan_cad.tools.attention_server import AttentionServer

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; give --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    server = AttentionServer(
        host,
        int(port),
        str(token),
        device=torch.device(device),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.leave())
    server.run()
