# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of train_configs/ as the commands that simulate them read them."""

from tests.lib.sets import CONFIGS
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan_cad.tools.simulated_job import SimulatedJob, read_simulated_job  # noqa: E402


def read_job(config: str, *options: str, ranks: int = 64) -> SimulatedJob:
    """Read ``train_configs/<config>.toml`` with these options, for a number of ranks."""
    path = CONFIGS / f"{config}.toml"
    return read_simulated_job([f"--job.config_file={path}", *options], ranks)
