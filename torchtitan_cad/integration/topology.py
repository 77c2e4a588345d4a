"""Where a rank stands: torchtitan orders ranks as [pp, dp_replicate, dp_shard, cp, tp], tp fastest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism and the CAD groups they imply.

    A CAD group is all ranks with one TP coordinate and, in this version, one PP coordinate: dp x cp ranks, cp fastest.
    """

    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def from_job(cls, parallelism, world_size: int) -> "Topology":
        """From torchtitan's ``[parallelism]`` table; the data-parallel degree is what remains of the world."""
        pp = parallelism.pipeline_parallel_degree
        cp = parallelism.context_parallel_degree
        tp = parallelism.tensor_parallel_degree
        return cls(pp=pp, dp=world_size // (pp * cp * tp), cp=cp, tp=tp)

    @property
    def group_size(self) -> int:
        return self.dp * self.cp

    def group_ranks(self, rank: int) -> list[int]:
        """Global ranks of the CAD group that contains global ``rank``, in group order."""
        stage, tp_rank = rank // (self.group_size * self.tp), rank % self.tp
        first = stage * self.group_size * self.tp + tp_rank
        return [first + i * self.tp for i in range(self.group_size)]

    def group_rank(self, rank: int) -> int:
        return (rank // self.tp) % self.group_size

    def group_ranks_per_node(self, ranks_per_node: int) -> int:
        """Ranks of a CAD group that share a node, where nodes are ``ranks_per_node`` consecutive global ranks.

        Raises:
            ValueError: TP groups or pipeline stages are spread over nodes unevenly; names key, value and remedy.
        """
        stage = self.group_size * self.tp
        if ranks_per_node < 1 or ranks_per_node % self.tp or (stage % ranks_per_node and ranks_per_node % stage):
            raise ValueError(
                f"cad.ranks_per_node = {ranks_per_node}: set the ranks of a node, a multiple of "
                f"parallelism.tensor_parallel_degree = {self.tp} that divides the {stage} ranks of a pipeline stage or "
                "is a multiple of them, or leave it out"
            )
        return ranks_per_node // self.tp
