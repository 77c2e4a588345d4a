# SPDX-License-Identifier: BSD-3-Clause
"""Position of a rank in the parallel dimensions, ordered as torchtitan does: [pp, dp_replicate, dp_shard, cp, tp]."""

import math
from dataclasses import dataclass
from typing import Any

TICK_SCHEDULES = ("CAD1F1B", "CADInterleaved1F1B")
"""Values of ``parallelism.pipeline_parallel_schedule`` with one pool over all stages: one stage per rank, several."""

_DEGREES = (
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)


def degrees_of(parallelism: Any) -> dict[str, int]:
    """Return the degrees of torchtitan's ``[parallelism]`` table that are set, all but that of shards, by key."""
    return {key: getattr(parallelism, key) for key in _DEGREES}


def check_degrees(parallelism: Any, world_size: int) -> None:
    """Raise ValueError, naming keys, values and remedy, for degrees that do not multiply to the ranks of a job."""
    degrees = degrees_of(parallelism)
    shard = parallelism.data_parallel_shard_degree
    product = math.prod(degrees.values())
    if world_size % product or (shard > 0 and product * shard != world_size):
        listed = ", ".join(
            f"parallelism.{key} = {degree}" for key, degree in degrees.items()
        )
        raise ValueError(
            f"{listed}, parallelism.data_parallel_shard_degree = {shard} do not multiply to the {world_size} ranks of "
            "this job; set parallelism.data_parallel_shard_degree to -1 and the others to divisors of the rank count"
        )


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism and the CAD groups they imply.

    A CAD group is all ranks with one TP coordinate and one PP coordinate: dp x cp ranks, cp fastest. If tasks move
    ``across_stages``, it is all ranks with one TP coordinate: pp x dp x cp ranks.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    across_stages: bool = False

    @classmethod
    def from_job(cls, parallelism: Any, world_size: int) -> "Topology":
        """Read torchtitan's ``[parallelism]`` table; the data-parallel degree is what remains of the world."""
        pp = parallelism.pipeline_parallel_degree
        cp = parallelism.context_parallel_degree
        tp = parallelism.tensor_parallel_degree
        across_stages = (
            pp > 1 and parallelism.pipeline_parallel_schedule in TICK_SCHEDULES
        )
        return cls(
            pp=pp,
            dp=world_size // (pp * cp * tp),
            cp=cp,
            tp=tp,
            across_stages=across_stages,
        )

    @property
    def group_stages(self) -> int:
        """Ranks of one pipeline that are in the same CAD group."""
        return self.pp if self.across_stages else 1

    @property
    def num_groups(self) -> int:
        """CAD groups with one TP coordinate."""
        return self.pp // self.group_stages

    @property
    def group_size(self) -> int:
        """Ranks of a CAD group."""
        return self.group_stages * self.dp * self.cp

    def group_ranks(self, rank: int) -> list[int]:
        """Return the global ranks of the CAD group that contains global ``rank``, in group order."""
        group = rank // (self.group_size * self.tp)
        tp_rank = rank % self.tp
        first = group * self.group_size * self.tp + tp_rank
        return [first + i * self.tp for i in range(self.group_size)]

    def group_rank(self, rank: int) -> int:
        """Return the position of a global rank in its CAD group."""
        return (rank // self.tp) % self.group_size

    def group_ranks_per_node(self, ranks_per_node: int) -> int:
        """Count the ranks of a CAD group that share a node of ``ranks_per_node`` consecutive global ranks.

        Raises ValueError if TP groups or CAD groups are spread over nodes unevenly.
        """
        together = self.group_size * self.tp
        if (
            ranks_per_node < 1
            or ranks_per_node % self.tp
            or (together % ranks_per_node and ranks_per_node % together)
        ):
            raise ValueError(
                f"cad.ranks_per_node = {ranks_per_node}: set the ranks of a node, a multiple of "
                f"parallelism.tensor_parallel_degree = {self.tp} that divides the {together} ranks of a CAD group and "
                "its tensor-parallel peers or is a multiple of them, or leave it out"
            )
        return ranks_per_node // self.tp
