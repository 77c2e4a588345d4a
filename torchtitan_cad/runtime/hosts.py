# SPDX-License-Identifier: BSD-3-Clause
"""What a host is: for the transport, for the rates of links, for planning by nodes, and for whom a rank watches."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def host_name() -> str:
    """Return a name that the processes of one host have, and no others.

    They see each other's processes. Containers on two machines may have one host name, and two containers on one
    machine have the machine's boot id and may have its host name.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(_BOOT_ID.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_PROCESSES))
    return " ".join(parts)


def number_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for every rank's host, given the host's name; hosts count from 0, in the order of the ranks."""
    hosts = list(dict.fromkeys(names))
    return tuple(map(hosts.index, names))
