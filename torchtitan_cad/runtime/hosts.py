# SPDX-License-Identifier: BSD-3-Clause
"""What a host is: for the transport, for the rates of links, for planning by nodes, and for whom a rank watches."""

import socket
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return a name of this process's host that no other host has: its boot id, where it has one, and its host name.

    Containers on two machines may have one host name, and two containers on one machine have the machine's boot id.
    """
    boot_id = ""
    if _BOOT_ID.exists():
        boot_id = _BOOT_ID.read_text().strip()
    return f"{boot_id} {socket.gethostname()}"


def number_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for every rank's host, given the host's name; hosts count from 0, in the order of the ranks."""
    hosts = list(dict.fromkeys(names))
    return tuple(map(hosts.index, names))
