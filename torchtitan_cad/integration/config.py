# SPDX-License-Identifier: BSD-3-Clause
"""The ``[cad]`` table, and what planners make of it."""

from dataclasses import dataclass, replace
from typing import Literal

from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import (
    PlannerConfig,
    get_planner,
)
from torchtitan_cad.planning.exchange.messages import buffer_bytes


@dataclass
class Cad:
    tolerance: float | Literal["auto"] = "auto"
    """
    "auto" makes the plans of least time, by rates that are measured when the job starts. Where moving saves less than
    1 % of a layer's time, attention stays with its tokens. A number is the allowed imbalance: every rank's attention
    work is at most (1 + tolerance) times the mean, whatever that takes. With debug.deterministic "auto" is 0.02
    (docs/numerics.md).
    """

    min_shard: int = 128
    """
    Tokens; documents are cut at multiples of it. Multiples of 128 are cuts on the kernel's tiles.
    """

    planner: str = PlannerConfig.planner
    """
    Which planner assigns tasks to ranks: "local_search", or "home" (nothing moves; for measurements).
    """

    placement: str = "auto"
    """
    Which rank holds which tokens of an optimizer step, and in which microbatch: "balanced" redistributes token ids and
    labels, ahead of training, such that no rank has much to send or receive (docs/planning.md). Losses and gradients
    stay those of the same global batch. "auto" does so too, but skips what it cannot redistribute, such as batches with
    keys of their own, which end the job with "balanced". "loader" leaves every rank what its loader gave it.
    """

    receive_buffer_gb: float | None = None
    """
    GB that a GPU's receive buffers take with transport = "symm_mem", allocated once, in equal parts for the
    nano-batches. What does not fit travels in several chunks. By default 0.65 for each nano-batch.
    """

    ranks_per_node: int | None = None
    """
    GPUs of a node: plans avoid traffic between nodes, of which a byte counts as much as four inside a node. By default
    the ranks of a host, if all hosts have equally many; else, and on one host, all bytes count the same.
    """

    nano_batches: int = 1
    """
    2: two halves of every microbatch take turns, and the exchange of one hides behind the other's compute. An even
    number of rows per microbatch is halved by rows, an odd one in the middle of every row, which tensor parallelism
    does not allow. 1: no overlap.
    """

    streams: str = "auto"
    """
    How two nano-batches run in compiled code: "traced" compiles the exchanges too, streams and events included
    (docs/pipelines.md); it needs torch 2.14.1. "opaque" leaves exchanges between compiled segments. "auto" takes traced
    on CPU ranks where it is possible, else opaque; on CUDA opaque, as no GPU has run traced yet.
    """

    transport: str = "auto"
    """
    How rows travel: "collective" is all_to_all_single over gloo or NCCL; "symm_mem", on CUDA, writes into the memory
    of peers on the same host, by Triton kernels, and sends to other hosts by NCCL. "auto": symm_mem on CUDA where a
    trial succeeds, else collective. "nvshmem" writes to other hosts, too; where NVSHMEM cannot
    start, it ends the process (docs/how_it_works.md).
    """

    kernel: str = "auto"
    """
    Attention kernel: "varlen" is PyTorch's built-in FlashAttention-2 (CUDA), "flash_attn" FlashAttention-4, 3 or 2
    as installed and made for the GPU, "cudnn" what stock torch 2.15 takes on Hopper and Blackwell, "cpu" an exact
    kernel for CPU ranks. "auto": on CUDA the first that is installed, made for the GPU and takes the model's heads:
    FlashAttention-4, FlashAttention-3, cudnn, FlashAttention-2, varlen.
    """

    backward: str = "auto"
    """
    "resend": Q, K and V travel again for backward. "keep": servers keep what they received, which spares that way and
    takes memory. "auto": they keep it by plans for which the job leaves room (docs/cost.md), else resend.
    """

    recompute_attention: bool = True
    """
    With activation_checkpoint.mode = "full": compute core attention, exchanges included, once more in backward. False:
    keep its output instead, and with nano_batches = 2 its queries, keys and values as well.
    """

    documents: str = "eos"
    """
    How documents are delimited. "eos": after every EOS token; "positions": one begins wherever the batch key
    "positions" is 0; "row" makes every row of the batch one document, the plain causal mask. Batches may carry
    "document_ids" instead.
    """

    eos_id: int | None = None
    """
    The token that ends documents with documents = "eos". By default the tokenizer's EOS, which with instruct models may
    end a turn, not a document.
    """

    shadow: bool = False
    """
    True: train as torchtitan does, log the imbalance of attention, and record the documents of every step, from which
    `torchtitan-cad simulate --documents RUN` predicts the gain (docs/get_started.md).
    """

    servers: bool = False
    """
    True: attention servers may join the job while it runs (`torchtitan-cad serve`), and leave or fail at any time. They
    compute tasks whose tokens all lie on one rank, which computes them itself if no answer comes (docs/operations.md).
    """

    servers_token: str | None = None
    """
    What attention servers must give to join, so that they may wait for the next job; by default drawn anew, and logged.
    """

    servers_port: int = 0
    """
    TCP port on the host of rank 0 at which ranks and attention servers meet. 0: any that is free, which the log names.
    With a port and a token of their own jobs that start again, as by torchrun's --max-restarts, get their servers back.
    """

    heartbeat_seconds: float = 1.0
    """
    Seconds between heartbeats, by which a failed run names the peer at fault: after five without one a rank is reported
    as silent.
    """

    def deterministic(self) -> "Cad":
        """Return a table by which equal batches get equal plans: "auto" becomes the planner's own tolerance.

        Raises:
            ValueError: servers may join, by whose speed plans change.
        """
        if self.servers:
            raise ValueError(
                "cad.servers = True changes plans while a job with debug.deterministic = true runs; set one of them to "
                "false"
            )
        return (
            replace(self, tolerance=PlannerConfig.tolerance)
            if self.tolerance == "auto"
            else self
        )

    def check_eos_id(self) -> None:
        """Raise ValueError for ``eos_id`` where no token ends documents."""
        if self.eos_id is not None and self.documents != "eos":
            raise ValueError(
                f"cad.eos_id = {self.eos_id} ends no document with cad.documents = {self.documents!r}; leave it out, "
                "or set cad.documents to 'eos'"
            )

    def planner_config(self, topology: Topology | None = None) -> PlannerConfig:
        """Give the planner's view of this table, for the CAD groups of ``topology``; by default one group, without TP.

        Raises:
            ValueError: a value the planner cannot work with; names key, value and remedy.
        """
        ranks_per_node = self.ranks_per_node
        if ranks_per_node is not None and topology is not None:
            ranks_per_node = topology.group_ranks_per_node(ranks_per_node)
        try:
            get_planner(self.planner)
            return PlannerConfig(
                tolerance=PlannerConfig.tolerance
                if self.tolerance == "auto"
                else self.tolerance,
                min_shard=self.min_shard,
                planner=self.planner,
                ranks_per_node=ranks_per_node,
            )
        except ValueError as error:
            raise ValueError(f"cad.{error}") from None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one receive buffer. Raises ValueError naming key, value and remedy."""
        try:
            return buffer_bytes(self.receive_buffer_gb, self.nano_batches)
        except ValueError as error:
            raise ValueError(f"cad.{error}") from None
