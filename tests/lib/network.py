# SPDX-License-Identifier: BSD-3-Clause
"""Nodes of a cluster on one machine: network namespaces with host names of their own, joined by links of a set rate.

Needs Linux, root and iproute2. Every node is a network namespace with one interface, `eth0`, on a bridge that lies in a
namespace of its own, so that the machine's network is not touched. A token bucket (`tc tbf`) limits what leaves a node.
"""

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

SUBNET = "10.77.0"
BURST_BYTES = 64 << 10
"""bytes: at most sent at once by a limited link"""
LONGEST_QUEUE = "200ms"
"""time: how long a packet may wait for a limited link before it is dropped, and sent again"""


@functools.cache
def missing() -> str | None:
    """Tell why this machine cannot have nodes; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian packages iproute2 and util-linux)"
    try:
        with Nodes(2) as nodes:
            nodes.limit(1e9)
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)}: {error.stderr.strip()}"
    return None


class Nodes:
    """``count`` nodes, node0, node1 and so on; ``__exit__`` ends all that runs on them. ``name`` tells from others."""

    def __init__(self, count: int, name: str = "") -> None:
        self.count, self._name = count, f"cad{os.getpid()}{name}"

    def __enter__(self) -> "Nodes":
        try:
            self._add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _add(self) -> None:
        switch = self._space("switch")
        commands = [
            f"ip netns add {switch}",
            f"ip -n {switch} link add bridge type bridge",
            f"ip -n {switch} link set bridge up",
        ]
        for node in range(self.count):
            space = self._space(node)
            port = f"port{node}"
            peer = f"peer name {port} netns {switch}"
            commands += [
                f"ip netns add {space}",
                f"ip link add eth0 netns {space} type veth {peer}",
                f"ip -n {space} addr add {self.address(node)}/24 dev eth0",
                f"ip -n {space} link set lo up",
                f"ip -n {space} link set eth0 up",
                f"ip -n {switch} link set {port} up",
                f"ip -n {switch} link set {port} master bridge",
            ]
        for command in commands:
            _run(command)

    def close(self) -> None:
        """End the nodes' processes and remove the nodes."""
        for node in range(self.count):
            self.signal(node, signal.SIGKILL)
        for node in (*range(self.count), "switch"):
            _run(f"ip netns del {self._space(node)}", check=False)

    def signal(self, node: int, number: int) -> None:
        """Send a signal to all processes of a node."""
        pids = _run(f"ip netns pids {self._space(node)}", check=False)
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"{SUBNET}.{node + 1}"

    def limit(self, bits_per_second: float | None) -> None:
        """Limit what each node sends, None: not at all."""
        for node in range(self.count):
            queue = f"ip netns exec {self._space(node)} tc qdisc"
            _run(f"{queue} del dev eth0 root", check=False)
            if bits_per_second is not None:
                bucket = f"rate {bits_per_second:.0f} burst {BURST_BYTES} latency {LONGEST_QUEUE}"
                _run(f"{queue} add dev eth0 root tbf {bucket}")

    def cut(self, node: int) -> None:
        """Let no packet pass to or from a node, as if its cable were pulled at the switch."""
        _run(f"ip -n {self._space('switch')} link set port{node} down")

    def mend(self, node: int) -> None:
        """Take back ``cut``."""
        _run(f"ip -n {self._space('switch')} link set port{node} up")

    def start(self, node: int, command: Sequence[str], **options) -> subprocess.Popen:
        """Start a process on a node; ``options`` are those of ``subprocess.Popen``."""
        named = f"hostname node{node} && exec {shlex.join(command)}"
        shell = f"ip netns exec {self._space(node)} unshare --uts sh -c".split()
        return subprocess.Popen([*shell, named], **options)

    def torchrun(
        self,
        node: int,
        ranks: int,
        arguments: Sequence[str],
        *,
        core: int | None = None,
        nnodes: int | None = None,
        **options,
    ) -> subprocess.Popen:
        """Start ``torchtitan_cad.launch`` on a node, with ``ranks`` ranks a node, all on one ``core`` if it is given.

        Node 0 has the rendezvous.
        """
        launcher = [
            *f"-m torchtitan_cad.launch --nnodes={nnodes or self.count} --nproc_per_node={ranks}".split(),
            *f"--rdzv_backend=c10d --rdzv_id=cad --rdzv_endpoint={self.address(0)}:29400".split(),
            f"--local_addr={self.address(node)}",
            f"--rdzv_conf=is_host={node == 0}",
        ]
        on_core = [] if core is None else ["taskset", "--cpu-list", str(core)]
        command = [*on_core, sys.executable, *launcher, *arguments]
        own = os.environ | options.pop("env", {})
        options["env"] = own | {"GLOO_SOCKET_IFNAME": "eth0"}
        return self.start(node, command, **options)

    def _space(self, node: int | str) -> str:
        return f"{self._name}-{node}"


def _run(command: str, *, check: bool = True) -> str:
    """Return what a command prints, whose words have no spaces."""
    words = command.split()
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout
