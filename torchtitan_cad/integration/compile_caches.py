# SPDX-License-Identifier: BSD-3-Clause
"""Keys of torch's caches of compiled graphs, so that a rank takes only graphs that are right for it.

torch looks for a graph by what the graph is compiled from: code, shapes, placements of tensors and all ranks of their
mesh. What tracing writes into the graph is in no key (torch 2.11 to 2.15): where this rank is in the mesh, such as the
first row of its part of the vocabulary; the names of its process groups; and what operators of this package call in
backward. ``torch.compiler.config.cache_key_tag`` is a part of the keys of all caches, on this machine and remote.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_cad import runtime

REPLICAS = frozenset({"batch", "loss", "dp_replicate", "fsdp", "efsdp"})
"""Dimensions of torchtitan's meshes along which ranks run the same graphs: FSDP2 shards outside of them."""

_MARK = "|torchtitan_cad "


def separate_compile_caches(meshes: Mapping[str, DeviceMesh]) -> None:
    """Let this process share compiled graphs only with its replicas, now and in later runs; idempotent.

    What was in the tag before, such as a user's own, stays in front.

    Args:
        meshes: those of one dimension and more than one rank, by torchtitan's names.
    """
    of_others, *_ = torch.compiler.config.cache_key_tag.partition(_MARK)
    torch.compiler.config.cache_key_tag = (
        f"{of_others}{_MARK}{_operators_digest()}, {graph_place(meshes)}"
    )


def graph_place(meshes: Mapping[str, DeviceMesh]) -> str:
    """Return what graphs may hold of this rank: per dimension that is not of replicas its place, size and group."""
    places = (
        f"{name} {mesh.get_local_rank()} of {mesh.size()} in group {mesh.get_group().group_name}"
        for name, mesh in sorted(meshes.items())
        if name not in REPLICAS
    )
    return ", ".join(places)


@functools.cache
def _operators_digest() -> str:
    """Return a hash of the sources of all operators."""
    sources = sorted(Path(runtime.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[
        :16
    ]
