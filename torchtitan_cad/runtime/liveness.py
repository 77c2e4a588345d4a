"""Who is still alive: lets a rank whose communication failed name the peer that died.

Every rank raises a counter in the job's key-value store; a peer whose counter stands still is dead or stuck. Counters
rather than times, so clocks need not agree. No communication of the training itself is involved.
"""

import os
import socket
import threading
import time

import torch.distributed as dist

_PREFIX = "torchtitan_cad/alive"


class PeerMonitor:
    """Publishes this rank's sign of life and looks for peers that stopped giving theirs.

    Args:
        store: the job's store; cloned where possible, so that waits in other threads do not block it.
        interval_s: seconds between signs of life.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, interval_s: float) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._rank, self._world_size, self._interval_s = rank, world_size, interval_s
        self._stop = threading.Event()
        self._store.set(f"{_PREFIX}/{rank}/name", f"{socket.gethostname()}, pid {os.getpid()}")
        self._store.set(f"{_PREFIX}/{rank}/count", "0")
        self._thread = threading.Thread(target=self._beat, name="cad-liveness", daemon=True)
        self._thread.start()

    def silent_peers(self) -> list[str]:
        """Peers that gave no sign of life for four intervals, as 'rank 3 (host, pid 12)'. Takes that long.

        If the store itself cannot be reached, its host is what died; that is said instead.
        """
        try:
            before = self._counts()
            time.sleep(4 * self._interval_s)
            after = self._counts()
            silent = [r for r in range(self._world_size) if r != self._rank and before[r] == after[r]]
            return [f"rank {r} ({self._store.get(f'{_PREFIX}/{r}/name').decode()})" for r in silent]
        except (RuntimeError, dist.DistError) as error:
            return [f"the host of the job's key-value store, normally rank 0 ({error})"]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self._interval_s)

    def _counts(self) -> list[bytes]:
        return self._store.multi_get([f"{_PREFIX}/{r}/count" for r in range(self._world_size)])

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._interval_s):
            count += 1
            try:
                self._store.set(f"{_PREFIX}/{self._rank}/count", str(count))
            except (RuntimeError, dist.DistError):
                return  # the store is gone; silent_peers says so when asked
