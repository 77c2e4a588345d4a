# SPDX-License-Identifier: BSD-3-Clause
"""``job.custom_config_module = "torchtitan_cad.job_config"``: the one key that brings CAD into a torchtitan job.

torchtitan merges these dataclasses into its own ``JobConfig`` (config/manager.py), so that ``[parallelism] cad`` and
``[cad]`` work in TOML and as ``--parallelism.cad`` and ``--cad.*`` on the command line. Importing this module also
lets ``plugin.on_config`` (integration/torchtitan_v0_2) see the parsed config.
"""

from dataclasses import dataclass, field

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.titan import check_has_toml

check_has_toml()

from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402


@dataclass
class Parallelism:
    """Keys that are added to ``[parallelism]``."""

    cad: bool = False
    """
    Core attention disaggregation: every document's core attention is cut into tasks that run on whichever rank has
    room (arXiv 2510.18121). Off: stock torchtitan.
    """


@dataclass
class JobConfig:
    """Sections that torchtitan merges into its own ``JobConfig``."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    cad: Cad = field(default_factory=Cad)


plugin.install()
