# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing by operator in compiled graphs with streams (torch 2.14, 2.15)."""

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.streams import is_bwd_node
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class RecomputeFromBefore(CustomGraphPass):
    """Lets backward recompute what forward has computed before it records or waits for an event.

    To keep the order of nodes, torch lets every later user of an earlier result, backward's included, take it from the
    node that records or waits. That one cannot be computed again, so nor could any result in front of it, and the graph
    could not be divided into forward and backward. Here backward takes results that are to be recomputed from where
    they were computed.
    """

    def __call__(self, graph: fx.Graph) -> None:
        computed: dict[fx.Node, fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=operator.getitem):
            passing, index = node.args
            if (
                passing.target is not torch.ops.higher_order.control_deps
                or "recompute" not in node.meta
            ):
                continue
            del node.meta["recompute"]
            if is_bwd_node(passing):
                continue
            _, _, *passed = passing.args
            source = passed[index - 1]  # the first output is that of the record or wait
            computed[node] = computed.get(source, source)
            node.replace_all_uses_with(computed[node], is_bwd_node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
