"""Memory over many steps: what grows with every batch shows only then."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.compositions import PLACED
from tests.integration.harness import run
from tests.runtime.threaded import needs_linux

STEPS, SETTLED, WINDOW, LOG_FREQ = 2000, 300, 100, 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the memory figures of Linux")
@pytest.mark.parametrize("transport", ["collective", pytest.param("symm_mem", marks=needs_linux)])
def test_resident_memory_does_not_grow(transport: str) -> None:
    """From step 300 on, means over 100 steps are within 1% of each other, on every rank and over 1,700 plans."""
    job = [*PLACED, f"--cad.transport={transport}", f"--training.steps={STEPS}", f"--metrics.log_freq={LOG_FREQ}"]
    result = run(job, nranks=2, timeout_s=3000)
    assert result.ok, result.report()
    assert len(result.resident_bytes) == 2
    for memory in result.resident_bytes:
        starts = range(SETTLED, STEPS, WINDOW)
        means = [fmean(n for step, n in memory.items() if start < step <= start + WINDOW) for start in starts]
        assert max(means) <= 1.01 * min(means), [f"{mean / 2**20:.1f} MiB" for mean in means]
