# SPDX-License-Identifier: BSD-3-Clause
"""Seconds that the parts of a layer take on one GPU.

Two directions, forward and backward; backward includes what activation checkpointing computes again, except for whole
layers, whose forward passes are separate (``Step.repeats_forward``). Where all linear work is repeated, TP's
collectives are, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning import (
    AttentionShape,
    LayerTimes,
    Plan,
    PlannerConfig,
    TileAreaCost,
)
from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.keeping import GRADIENT_BYTES, LOGIT_BYTES, Checkpointing
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.pipeline.one_f_one_b import BACKWARD_LINEAR
from torchtitan_cad.planning.timed import link_seconds
from torchtitan_cad.tools.simulation.inputs import Cluster, Model, Rates

PROBE_TOKENS = 64
"""Tiles of the document whose attention a job measures."""
TP_COLLECTIVES = np.array([1, 3])
"""Sequence-parallel collectives before and after core attention: a gather; the scatter of wo, the gather before and the
scatter after the MLP. As many in backward."""


def elementwise_elements(model: Model, forward: bool) -> FloatArray:
    """Return the elements per token that a layer's elementwise work reads and writes before and after core attention.

    Every operation reads its inputs and writes its outputs once, as compiled blocks do. Forward: x and y of both norms,
    three of both residual sums; Q and K twice for the rotary embedding; three of the MLP's width for its activation.
    Backward: three of each norm and each sum, Q and K twice, five of the MLP's width.
    """
    norm, wide = (2, 3) if forward else (3, 5)
    rotary = 2 * model.head_dim * (model.heads + model.kv_heads)
    return np.array(
        [norm * model.hidden + rotary, (norm + 6) * model.hidden + wide * model.ffn],
        dtype=np.float64,
    )


@dataclass(frozen=True)
class Transfer:
    """One exchange: seconds [ranks] of each rank's sending and receiving, whether the first of two ranks ``sends`` rows
    to the second, [ranks, ranks], and bytes of all ranks.
    """

    seconds: FloatArray
    sends: npt.NDArray[np.bool_]
    num_bytes: float

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Senders, ordered by their receivers; these, each once; and where the senders of each begin."""
        receiver, sender = np.nonzero(self.sends.T)
        receivers, begins = np.unique(receiver, return_index=True)
        return sender, receivers, begins

    @cached_property
    def active(self) -> npt.NDArray[np.bool_]:
        """[ranks] that send or receive."""
        return np.asarray(self.sends.any(axis=0) | self.sends.any(axis=1))


class Costs:
    """Costs of one model on one cluster: ``cost`` of attention, and ``unit_seconds`` of it, forward and backward.

    ``parameters``, [2], are those of a layer's products before and after attention. Raises ValueError for heads that TP
    does not divide.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        rates: Rates,
        tile: int = PlannerConfig.tile,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.rates = rates
        self.kinds = model.kinds(cluster.tp)
        self.shape: AttentionShape = self.kinds[0].shape
        self.parameters = np.array(
            [model.pre_parameters(cluster.tp), model.post_parameters]
        )
        self.cost = TileAreaCost(tile)
        keys = self.shape.head_dim
        values = self.shape.out_dim
        heads = self.cost.max_pairs(1) * self.shape.num_heads
        self.unit_seconds = (
            heads * 2 * (keys + values) / rates.attention_flops,
            heads * (6 * keys + 4 * values) / rates.backward_flops,
        )

    def layer_times(self, ranks: int, overlaps: bool, kept_bytes: float) -> LayerTimes:
        """Predict the rates that a job with ``tolerance = "auto"`` measures when it starts, in groups of ``ranks``."""
        tokens = PROBE_TOKENS * self.cost.granularity
        seconds = sum(
            float(self.document_seconds(np.array([tokens]), forward)[0])
            for forward in (True, False)
        )
        return LayerTimes(
            unit=seconds / int(self.cost.prefix_cost(tokens)[-1]),
            linear=(1 + BACKWARD_LINEAR)
            * self._product_seconds(int(self.parameters.sum())),
            bytes_per_second=self.cluster.node,
            between_hosts=self.cluster.net,
            exchange=self.cluster.latency,
            overlaps=overlaps,
            hosts=self._hosts(ranks),
            kept_bytes=kept_bytes,
        )

    def attention_seconds(self, loads: npt.ArrayLike, forward: bool) -> FloatArray:
        """Return the seconds of loads in units of ``cost``."""
        unit = self.unit_seconds[0 if forward else 1]
        return np.asarray(loads, dtype=np.float64) * unit

    def document_seconds(
        self, lengths: IntArray, forward: bool, window: int | None = None
    ) -> FloatArray:
        """Return the seconds, [documents], of one layer's attention of whole documents of these lengths."""
        tile = self.cost.granularity
        rows = -(-np.asarray(lengths) // tile)
        cost = replace(self.cost, window=window)
        prefix = cost.prefix_cost(int(rows.max(initial=0)) * tile)
        return self.attention_seconds(prefix[rows], forward)

    def segments(
        self,
        tokens: float,
        forward: bool,
        checkpointing: Checkpointing = "none",
        tp: bool = True,
    ) -> tuple[float, float]:
        """Return the seconds of a layer's work before and after core attention, for ``tokens`` of one rank.

        ``tp`` False leaves out tensor parallelism's collectives.
        """
        model = self.model
        repeated = {} if forward else {"selective": 0.5, "linear": 1.0}
        again = repeated.get(checkpointing, 0.0)
        products = self._product_seconds(self.parameters)
        elements = elementwise_elements(model, forward)
        if again:  # selective checkpointing, too, saves products alone
            elements += elementwise_elements(model, True)
        factor = again + (1.0 if forward else BACKWARD_LINEAR)
        seconds = tokens * (
            products * factor + self._memory_seconds(elements * model.dtype_bytes)
        )
        if tp:
            times = 2 if again == 1 else 1
            seconds += times * TP_COLLECTIVES * self.tp_seconds(tokens)
        return float(seconds[0]), float(seconds[1])

    def _product_seconds(self, parameters: Any) -> Any:
        """Forward seconds per token of matrix products."""
        return 2 * parameters / (self.cluster.tp * self.rates.linear_flops)

    def _memory_seconds(self, num_bytes: Any) -> Any:
        """Seconds for bytes that are read or written, divided over the TP ranks."""
        return num_bytes / (self.cluster.tp * self.rates.memory_bandwidth)

    def head_seconds(self, tokens: float, forward: bool) -> float:
        """Return the seconds of the output layer and the loss; pipelines are taken to share them evenly."""
        model = self.model
        work = (1 if forward else BACKWARD_LINEAR) * self._product_seconds(
            model.hidden * model.vocabulary
        )
        loss = self._memory_seconds(
            model.vocabulary * (model.dtype_bytes + (2 if forward else 1) * LOGIT_BYTES)
        )
        return tokens * (work + loss)

    def tp_seconds(self, tokens: float) -> float:
        """Return the seconds of one gather or scatter over the TP ranks of the hidden states of ``tokens``."""
        cluster = self.cluster
        tp = cluster.tp
        if tp == 1:
            return 0.0
        bandwidth = cluster.node if tp <= cluster.ranks_per_node else cluster.net
        num_bytes = tokens * self.model.hidden * self.model.dtype_bytes * (tp - 1) / tp
        return cluster.latency + num_bytes / bandwidth

    def gather_seconds(
        self,
        tokens: npt.NDArray[Any],
        ranks: int | IntArray,
        forward: bool,
        keep: bool = False,
    ) -> FloatArray:
        """Return the seconds of all-gathers of the keys and values of ``tokens`` over ``ranks`` that share rows.

        Backward scatters their gradients and, unless ranks ``keep`` what they gathered, gathers again.
        """
        num_bytes = self.gathered_bytes(tokens, ranks, forward, keep)
        seconds = num_bytes / self._group_bandwidth(ranks)
        collectives = 1 if forward or keep else 2
        gathers = (tokens > 0) & (np.asarray(ranks) > 1)
        return np.where(gathers, collectives * self.cluster.latency + seconds, 0.0)

    def gathered_bytes(
        self, tokens: Any, ranks: int | IntArray, forward: bool, keep: bool = False
    ) -> Any:
        """Return the bytes that one of ``ranks`` receives in the exchange of ``gather_seconds``."""
        rows = RowBytes.of(self.shape)
        per_token = (
            rows.keys if forward else rows.key_gradients + (0 if keep else rows.keys)
        )
        return tokens * per_token * (ranks - 1) / ranks

    def parameter_seconds(
        self, parameters: float, group: int, gradients: bool
    ) -> float:
        """Return the seconds of gathering ``parameters``, before TP, over a group of data- and context-parallel ranks,
        and maybe of reducing their gradients.
        """
        if group == 1:
            return 0.0
        per_parameter = self.model.dtype_bytes + gradients * GRADIENT_BYTES
        num_bytes = per_parameter * parameters / self.cluster.tp
        seconds = num_bytes * (group - 1) / group / self._group_bandwidth(group)
        return float(seconds)

    def _group_bandwidth(self, ranks: int | IntArray) -> FloatArray:
        """Return the bytes per second that each of ``ranks`` receives in a gather over them.

        Those of a node share what comes from other nodes.
        """
        of_node = np.minimum(ranks, self.cluster.group_per_node)
        between = np.minimum(self.cluster.node, self.cluster.net * of_node)
        return np.where(ranks == of_node, self.cluster.node, between)

    def ring_seconds(
        self, tokens: npt.NDArray[Any], ranks: int | IntArray, forward: bool
    ) -> FloatArray:
        """Return the seconds of what ``gather_seconds`` moves, by a ring, whose slowest link sets the pace."""
        within = np.asarray(ranks) <= self.cluster.group_per_node
        bandwidth = np.where(within, self.cluster.node, self.cluster.net)
        num_bytes = self.gathered_bytes(tokens, ranks, forward)
        hops = np.asarray(ranks) - 1
        return np.where(
            hops > 0, hops * self.cluster.latency + num_bytes / bandwidth, 0.0
        )

    def transfers(
        self, plan: Plan, forward: bool, keep: bool
    ) -> tuple[Transfer, Transfer]:
        """Return the seconds of a layer's exchanges before and after its attention by a plan."""
        rows = RowBytes.of(self.shape, keep=keep)
        queries = plan.query_needs.sends
        both = queries | plan.key_needs.sends
        if forward:
            there = (rows.forward_queries, rows.keys)
            back = (rows.outputs, 0)
            returning = queries
        else:
            there = (rows.backward_queries, 0 if keep else rows.keys)
            back = (rows.query_gradients, rows.key_gradients)
            returning = both
        first = self._transfer(plan, there, both)
        return first, self._transfer(plan, back, returning.T)

    def _transfer(
        self, plan: Plan, row_bytes: tuple[int, int], sends: npt.NDArray[np.bool_]
    ) -> Transfer:
        hosts = self._hosts(plan.layout.num_ranks)
        seconds = link_seconds(
            plan, row_bytes, hosts, self.cluster.node, self.cluster.net
        )
        seconds += self.cluster.latency * (sends.any(axis=0) | sends.any(axis=1))
        num_queries = int(plan.query_needs.rows_in.sum())
        num_keys = int(plan.key_needs.rows_in.sum())
        num_bytes = num_queries * row_bytes[0] + num_keys * row_bytes[1]
        return Transfer(seconds, sends, float(num_bytes))

    def _hosts(self, ranks: int) -> tuple[int, ...]:
        """Return the number of every rank's node, in a CAD group."""
        return tuple(rank // self.cluster.group_per_node for rank in range(ranks))
