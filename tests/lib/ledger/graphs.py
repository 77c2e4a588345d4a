# SPDX-License-Identifier: BSD-3-Clause
"""Runs compiled graphs with streams on ledger devices, in any order that the graph allows."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from torchtitan_cad.integration.pingpong.recomputation import RecomputeFromBefore

shuffle = 0
"""Seed of the order in which graphs run from now on; 0 is their own order."""

_compile = torch.compile  # tests put this function in its place


def compile_for_shuffling(function, **_) -> Callable[..., Any]:
    """``function`` through Dynamo, AOTAutograd and the partitioner, then node by node on the streams of the graph."""
    backend = aot_autograd(
        fw_compiler=_run_nodes, bw_compiler=_run_nodes, partition_fn=_partition
    )
    return _compile(function, backend=backend, fullgraph=True)


def _partition(
    module: fx.GraphModule, *args, **kwargs
) -> tuple[fx.GraphModule, fx.GraphModule]:
    RecomputeFromBefore()(module.graph)
    return min_cut_rematerialization_partition(module, *args, **kwargs)


def _run_nodes(module: fx.GraphModule, _) -> Callable[..., Any]:
    def run(*args):
        return _Nodes(module).run_in_order(_order(module), args)

    return make_boxed_func(run)


def _order(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes in a random order that respects data dependencies alone."""
    nodes = list(module.graph.nodes)
    if not shuffle:
        return nodes
    draw = random.Random(shuffle)
    order = [n for n in nodes if n.op == "placeholder"]
    waiting = dict.fromkeys(nodes[len(order) : -1])
    while waiting:
        ready = [n for n in waiting if waiting.keys().isdisjoint(n.all_input_nodes)]
        order.append(draw.choice(ready))
        del waiting[order[-1]]
    return [*order, nodes[-1]]


class _Nodes(fx.Interpreter):
    def run_in_order(self, order, args):
        self.args_iter = iter(args)
        self.env = {}
        last_use = {source: node for node in order for source in node.all_input_nodes}
        for node in order:
            self.env[node] = result = self.run_node(node)
            for source in node.all_input_nodes:
                if last_use[source] is node:
                    del self.env[source]
        return result

    def run_node(self, node):
        index = (
            (node.meta.get("custom") or {}).get("stream")
            if node.op == "call_function"
            else None
        )
        if index is None:
            return super().run_node(node)
        from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

        with get_external_object_by_index(index):
            return super().run_node(node)
