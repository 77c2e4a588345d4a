"""Seconds that the parts of a layer take on one GPU.

Two directions, forward and backward; backward includes what activation checkpointing computes again, except for whole
layers, whose forward passes are separate (``Costs.repeats_forward``). Where all linear work is repeated, TP's
collectives are, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning import AttentionShape, LayerTimes, Plan, TileAreaCost
from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.intervals import FloatArray, IntArray, concat_ranges
from torchtitan_cad.planning.model.cost import PICOSECONDS, CostModel
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.simulation.inputs import Cluster, Model, Rates, Settings

BACKWARD_LINEAR = 2.0
"""Operations of a matrix product's backward over its forward's."""
BACKWARD_ATTENTION = 2.5
GRADIENT_BYTES = 4
LOGIT_BYTES = 4
"""bytes: the fp32 copy of a logit."""
PROBE_TOKENS = 64
"""Tiles of the document whose attention a job measures."""
TP_COLLECTIVES = {"pre": 1, "post": 3}
"""Sequence-parallel collectives around core attention: the gather before it; after it the scatter of wo, the gather
before and the scatter after the MLP. As many in backward."""


def elementwise_elements(model: Model, forward: bool) -> tuple[float, float]:
    """Return the elements per token that a layer's elementwise work reads and writes before and after core attention.

    Every operation reads its inputs and writes its outputs once, as compiled blocks do. Forward: x and y of both norms,
    three of both residual sums; Q and K twice for the rotary embedding; three of the MLP's width for its activation.
    Backward: three of each norm and each sum, Q and K twice, five of the MLP's width.
    """
    norm, wide = (2, 3) if forward else (3, 5)
    rotary = 2 * model.head_dim * (model.heads + model.kv_heads)
    return norm * model.hidden + rotary, (norm + 6) * model.hidden + wide * model.ffn


@dataclass(frozen=True)
class Transfer:
    """One exchange.

    Attributes:
        seconds: [ranks] that each rank's sending and receiving takes.
        sends: bool [ranks, ranks] whether the first sends rows to the second.
    """

    seconds: FloatArray
    sends: npt.NDArray[np.bool_]

    @cached_property
    def active(self) -> npt.NDArray[np.bool_]:
        """[ranks] that send or receive."""
        return np.asarray(self.sends.any(axis=0) | self.sends.any(axis=1))


@dataclass(frozen=True)
class Regions:
    """Seconds of the work between core attentions, for some tokens of one rank: before, after, and of TP in each."""

    pre: float
    post: float
    tp_pre: float
    tp_post: float


class Costs:
    """Costs of one model on one cluster.

    Raises:
        ValueError: heads that TP does not divide, or a profile of another kind of attention.
    """

    def __init__(self, model: Model, cluster: Cluster, rates: Rates, settings: Settings | None = None) -> None:
        self.model, self.cluster, self.rates = model, cluster, rates
        self.settings = settings or Settings()
        self.shape: AttentionShape = model.shape(cluster.tp)
        _ = self.models  # a profile that does not fit is an error before anything is simulated

    @property
    def repeats_forward(self) -> bool:
        """Tell whether backward computes whole layers again, attention and its exchanges too."""
        return self.model.checkpointing == "full"

    @cached_property
    def models(self) -> tuple[CostModel, CostModel]:
        """Cost models of attention forward and backward."""
        if self.rates.profile is not None:
            profile = self.rates.profile
            return profile.cost_model("forward", self.shape), profile.cost_model("backward", self.shape)
        tiles = TileAreaCost(self.settings.planner.cost_tile)
        return tiles, tiles

    @cached_property
    def plan_cost(self) -> CostModel:
        """Cost model that plans balance: forward and backward together."""
        profile = self.rates.profile
        return self.models[0] if profile is None else profile.cost_model("both", self.shape)

    def layer_times(self, ranks: int, overlaps: bool) -> LayerTimes:
        """Predict the rates that a job with ``tolerance = "auto"`` measures when it starts, for a CAD group of
        ``ranks``.
        """
        tokens = PROBE_TOKENS * self.models[0].granularity
        seconds = sum(float(self.document_seconds(np.array([tokens]), forward)[0]) for forward in (True, False))
        products = self._product_seconds(self.model.pre_parameters + self.model.post_parameters)
        return LayerTimes(
            unit=seconds / int(self.plan_cost.prefix_cost(tokens)[-1]),
            linear=(1 + BACKWARD_LINEAR) * products,
            bytes_per_second=self._bandwidth(ranks * self.cluster.tp),
            overlaps=overlaps,
        )

    def attention_seconds(self, loads: npt.ArrayLike, forward: bool) -> FloatArray:
        """Return the seconds of loads in units of ``models``."""
        units = np.asarray(loads, dtype=np.float64)
        if self.rates.profile is not None:
            return units / PICOSECONDS
        operations = 4 * self.shape.num_heads * self.shape.head_dim * self.models[0].granularity ** 2
        if forward:
            return units * operations / self.rates.attention_flops
        return units * (BACKWARD_ATTENTION * operations) / self.rates.backward_flops

    def document_seconds(self, lengths: IntArray, forward: bool) -> FloatArray:
        """Return the seconds, [documents], of one layer's attention of whole documents of so many tokens."""
        model = self.models[0 if forward else 1]
        rows = -(-np.asarray(lengths) // model.granularity)
        prefix = model.prefix_cost(int(rows.max(initial=0)) * model.granularity)
        return self.attention_seconds(prefix[rows], forward)

    def regions(self, tokens: float, forward: bool) -> Regions:
        """Return one layer's work between core attentions, for ``tokens`` of one rank."""
        model = self.model
        again = 0.0 if forward else {"selective": 0.5, "linear": 1.0}.get(model.checkpointing, 0.0)
        factor = again + (1.0 if forward else BACKWARD_LINEAR)
        tp = self.tp_seconds(tokens) * (2 if again == 1 else 1)
        elements = np.array(elementwise_elements(model, forward))
        if again:  # selective checkpointing, too, saves products alone
            elements += elementwise_elements(model, True)
        pre, post = elements * self._memory_seconds(model.dtype_bytes)
        return Regions(
            pre=tokens * (self._product_seconds(model.pre_parameters) * factor + pre),
            post=tokens * (self._product_seconds(model.post_parameters) * factor + post),
            tp_pre=TP_COLLECTIVES["pre"] * tp,
            tp_post=TP_COLLECTIVES["post"] * tp,
        )

    def _product_seconds(self, parameters: int) -> float:
        """Forward seconds per token of a layer's matrix products."""
        model = self.model
        if self.rates.linear_seconds is not None:
            return self.rates.linear_seconds * parameters / (model.pre_parameters + model.post_parameters)
        return 2 * parameters / (self.cluster.tp * self.rates.linear_flops)

    def _memory_seconds(self, num_bytes: float) -> float:
        """Seconds for bytes that are read or written, divided over the TP ranks."""
        return num_bytes / (self.cluster.tp * self.rates.memory_bandwidth)

    def head_seconds(self, tokens: float, forward: bool) -> float:
        """Return the seconds of the output layer and the loss; pipelines are taken to share them evenly."""
        model = self.model
        work = 2 * model.hidden * model.vocabulary / (self.cluster.tp * self.rates.linear_flops)
        loss = self._memory_seconds(model.vocabulary * (model.dtype_bytes + (2 if forward else 1) * LOGIT_BYTES))
        return tokens * ((1 if forward else BACKWARD_LINEAR) * work + loss)

    def tp_seconds(self, tokens: float) -> float:
        """Return the seconds of one gather or scatter over the TP ranks of the hidden states of ``tokens``."""
        tp = self.cluster.tp
        if tp == 1:
            return 0.0
        num_bytes = tokens * self.model.hidden * self.model.dtype_bytes * (tp - 1) / tp
        return self.cluster.latency + num_bytes / (self._bandwidth(tp))

    def gather_seconds(self, tokens: npt.NDArray[Any], ranks: int, forward: bool, keep: bool = False) -> FloatArray:
        """Return the seconds of all-gathers of the keys and values of ``tokens`` over ``ranks`` that share rows.

        Backward scatters their gradients and, unless ranks ``keep`` what they gathered, gathers again.
        """
        if ranks == 1:
            return np.zeros_like(tokens)
        seconds = self.gathered_bytes(tokens, ranks, forward, keep) / self._bandwidth(ranks * self.cluster.tp)
        collectives = 1 if forward or keep else 2
        return np.where(tokens > 0, collectives * self.cluster.latency + seconds, 0.0)

    def gathered_bytes(self, tokens: Any, ranks: int, forward: bool, keep: bool = False) -> Any:
        """Return the bytes that one of ``ranks`` receives in the exchange of ``gather_seconds``."""
        rows = RowBytes.of(self.shape)
        per_token = rows.keys if forward else rows.key_gradients + (0 if keep else rows.keys)
        return tokens * per_token * (ranks - 1) / ranks

    def parameter_seconds(self, parameters: float, group: int, bytes_per_parameter: int) -> float:
        """Return the seconds of gathering or reducing ``parameters``, before TP, over a group of data- and
        context-parallel ranks.
        """
        if group == 1:
            return 0.0
        num_bytes = bytes_per_parameter * parameters / self.cluster.tp * (group - 1) / group
        within = min(group, self.cluster.group_per_node)  # of a node, which share what comes from others
        return num_bytes / (self.cluster.node if group == within else self.cluster.net * within)

    def layer_parameter_seconds(self, group: int, forward: bool) -> float:
        """Return the seconds in which FSDP2 gathers, and in backward reduces, a layer's parameters."""
        parameters = self.model.pre_parameters + self.model.post_parameters
        num_bytes = self.model.dtype_bytes + (0 if forward else GRADIENT_BYTES)
        return self.parameter_seconds(parameters, group, num_bytes)

    def final_seconds(self, group: int, pp: int) -> float:
        """Return the seconds of reducing gradients and gathering parameters once per step, unless in every layer."""
        num_bytes = self.model.dtype_bytes + GRADIENT_BYTES
        return self.parameter_seconds(self.model.parameters / pp, group, num_bytes)

    def transfers(self, plan: Plan, forward: bool) -> tuple[Transfer, Transfer]:
        """Return the seconds of a layer's exchanges before and after its attention by a plan."""
        keep = self.settings.backward == "keep"
        rows = RowBytes.of(self.shape, keep=keep)
        there = (rows.forward_queries, rows.keys) if forward else (rows.backward_queries, 0 if keep else rows.keys)
        back = (rows.outputs, 0) if forward else (rows.query_gradients, rows.key_gradients)
        queries = senders(plan.query_needs)
        both = queries | senders(plan.key_needs)
        return (
            self._transfer(plan, there, both),
            self._transfer(plan, back, (queries if forward else both).T),
        )

    def _transfer(self, plan: Plan, row_bytes: tuple[int, int], sends: npt.NDArray[np.bool_]) -> Transfer:
        node = np.arange(plan.layout.num_ranks) // self.cluster.group_per_node
        every, inside = np.zeros((2, len(node))), np.zeros((2, len(node)))
        for needs, num_bytes in zip((plan.query_needs, plan.key_needs), row_bytes, strict=True):
            if num_bytes:
                every += num_bytes * np.stack([needs.rows_in(), needs.rows_out()])
                inside += num_bytes * np.stack(needs.rows_inside(node))
        outside = np.maximum(every - inside, 0)
        seconds = np.maximum(outside / self.cluster.net, inside / self.cluster.node).max(axis=0)
        seconds += np.where(sends.any(axis=0) | sends.any(axis=1), self.cluster.latency, 0.0)
        return Transfer(seconds, sends)

    def _bandwidth(self, ranks: int) -> float:
        return self.cluster.node if ranks <= self.cluster.ranks_per_node else self.cluster.net


def senders(needs: RowNeeds) -> npt.NDArray[np.bool_]:
    """Return bool [ranks, ranks]: whether the first is home to rows that the second, another one, uses."""
    first = np.searchsorted(needs.run_start, needs.start, side="right") - 1
    stop = np.searchsorted(needs.run_start, needs.end, side="left")
    sends = np.zeros((needs.num_ranks, needs.num_ranks), dtype=bool)
    sends[needs.run_home[concat_ranges(first, stop - first)], np.repeat(needs.server, stop - first)] = True
    np.fill_diagonal(sends, False)
    return sends
