# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's recipes of gpt_oss with CAD."""

from torchtitan_cad.recipes import registry_of

__getattr__, __dir__ = registry_of("gpt_oss")
