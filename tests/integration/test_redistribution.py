# SPDX-License-Identifier: BSD-3-Clause
"""Redistributing tokens to other homes: every token with its label and its position, on all ranks at once."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.jobs.loaders import gloo_group
from tests.lib.refusals import refusal
from tests.lib.sets import params
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan_cad.integration.loading.placement import (  # noqa: E402
    Placement,
    _of_one_stage,
    moved_bytes,
)
from torchtitan_cad.integration.loading.redistribution import (  # noqa: E402
    POSITIONS,
    Redistribution,
    _joined,
    check_redistributable,
    make_redistribution,
)
from torchtitan_cad.integration.topology import Topology  # noqa: E402
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout  # noqa: E402
from torchtitan_cad.planning.model.batch import (  # noqa: E402
    BatchShape,
    group_layout,
    nano_layouts,
    slots_of_nano_batches,
)
from torchtitan_cad.planning.model.kind import AttentionKind  # noqa: E402
from torchtitan_cad.runtime.errors import PlanMismatchError  # noqa: E402

KINDS = [
    AttentionKind(
        "full",
        1,
        AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=2),
    )
]
IGNORED = -100
TOPOLOGIES = [
    Topology(1, 3, 1, 1),
    Topology(1, 2, 2, 1),
    Topology(2, 2, 2, 1, across_stages=True),
]


def shuffled(layout: TokenLayout, rng: np.random.Generator) -> TokenLayout:
    """The same documents, cut anywhere and redistributed to ranks and places at random; as many tokens on every
    rank."""
    pieces = []
    for doc, length in zip(
        layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True
    ):
        cuts = [
            0,
            *sorted(
                {int(cut) for cut in rng.integers(1, length + 1, size=rng.integers(4))}
                - {length}
            ),
            length,
        ]
        pieces += [(doc, start, end - start) for start, end in pairwise(cuts)]
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.num_ranks)]
    rooms, rank = layout.tokens_per_rank.tolist(), 0
    for doc, start, left in (pieces[i] for i in rng.permutation(len(pieces))):
        while left:
            while not rooms[rank]:
                rank += 1
            part = min(left, rooms[rank])
            ranks[rank].append((doc, start, part))
            rooms[rank], start, left = rooms[rank] - part, start + part, left - part
    return TokenLayout.from_segments(ranks)


def parts(layout: TokenLayout, count: int) -> list[TokenLayout]:
    """The inverse of ``_joined``; parts of a document may be in several."""
    num_ranks = layout.num_ranks // count
    number, rank = np.divmod(layout.seg_rank, num_ranks)
    columns = (
        rank,
        layout.seg_doc,
        layout.seg_start,
        layout.seg_length,
        layout.seg_attends,
    )
    return [
        TokenLayout(num_ranks, *(column[number == part] for column in columns))
        for part in range(count)
    ]


def expand(layout: TokenLayout) -> list[list[tuple[int, int]]]:
    """Per rank, (document, position) of every local row."""
    return [
        [(doc, start + i) for doc, start, n in segments for i in range(n)]
        for segments in layout.segments()
    ]


def exchanged(
    redistributions: list[Redistribution], batches: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Batches of the data-parallel ranks, which had ``batches`` [B, S], once each has carried out its
    redistribution."""
    messages = [
        batch.flatten()[redistribution.sent].split(redistribution.send_counts)
        for redistribution, batch in zip(redistributions, batches, strict=True)
    ]
    came = [
        torch.cat([sent[rank] for sent in messages])
        for rank in range(len(redistributions))
    ]
    for rank, redistribution in enumerate(redistributions):
        assert [len(sent[rank]) for sent in messages] == redistribution.receive_counts
    return [
        redistribution.scatter(x).view_as(b)
        for redistribution, x, b in zip(redistributions, came, batches, strict=True)
    ]


@given(st.data())
def test_every_token_comes_to_its_home(data):
    """Looks up, token by token, what the new layouts say; and redistributes everything back."""
    dp, cp, microbatches, rows = (data.draw(st.integers(1, 3)) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = BatchShape(rows * microbatches, cp * data.draw(st.integers(1, 8)), rows)
    size = shape.rows * shape.seq_len
    starts = [
        np.union1d(
            np.arange(0, size, shape.seq_len), rng.integers(0, size, size=size // 3)
        )
        for _ in range(dp)
    ]
    old = [group_layout(starts, shape, i, cp) for i in range(microbatches)]
    new = parts(shuffled(_joined(old), rng), microbatches)
    slots = [
        slot
        for i in range(microbatches)
        for slot in slots_of_nano_batches(shape, i, cp, 1)
    ]
    redistributions = [make_redistribution(old, new, slots, rank) for rank in range(dp)]
    batches = [
        torch.arange(rank * size, (rank + 1) * size).view(shape.rows, -1)
        for rank in range(dp)
    ]
    redistributed = exchanged(redistributions, batches)

    def tokens_of(batches: list[torch.Tensor]) -> list[int]:
        """In the order of (microbatch, data-parallel rank, context-parallel rank), the last changing first."""
        chunks = [
            batch.split(rows)[i].chunk(cp, 1)
            for i in range(microbatches)
            for batch in batches
        ]
        return torch.cat(
            [chunk.flatten() for each in chunks for chunk in each]
        ).tolist()

    before, after = (
        chain.from_iterable(expand(_joined(layouts))) for layouts in (old, new)
    )
    token = dict(zip(before, tokens_of(batches), strict=True))
    assert tokens_of(redistributed) == [token[each] for each in after]
    for rank, redistribution in enumerate(redistributions):
        assert torch.equal(
            redistribution.positions(shape.seq_len),
            (redistributed[rank] % shape.seq_len).int(),
        )
    back = [make_redistribution(new, old, slots, rank) for rank in range(dp)]
    assert all(
        torch.equal(one, other)
        for one, other in zip(exchanged(back, redistributed), batches, strict=True)
    )


def connected(
    topology: Topology, replicas: bool = False, **config: Any
) -> list[Placement]:
    """The placements of all ranks of a CAD group, over gloo; with ``replicas`` the ranks are replicas of each other."""
    store = dist.HashStore()

    def connect(rank: int) -> Placement:
        group = gloo_group(store, rank, topology.group_size, timeout_s=60)
        planner = PlannerConfig(min_shard=1, tile=1, **config)
        return Placement(
            group, group if replicas else None, topology, rank, planner, KINDS, None
        )

    with ThreadPoolExecutor(topology.group_size) as pool:
        return list(pool.map(connect, range(topology.group_size)))


@pytest.mark.parametrize("topology", params(TOPOLOGIES, TOPOLOGIES[-1:]), ids=str)
@pytest.mark.parametrize(
    "rows_and_halves", params(product((1, 2), (1, 2)), [(1, 2)]), ids=str
)
@pytest.mark.parametrize(
    "own", params([False, True], [True]), ids=["columns", "own positions"]
)
def test_ranks_redistribute_ids_labels_and_positions(topology, rows_and_halves, own):
    """Two batches, in which all data-parallel ranks but the first have short documents: there is something to
    redistribution."""
    dp, cp, (rows, nano_batches) = topology.dp, topology.cp, rows_and_halves
    shape = BatchShape(2 * rows, 64, rows)
    size = shape.rows * shape.seq_len
    starts = [np.arange(0, size, 32 if rank == 0 else 4) for rank in range(dp)]
    given = [
        nano_layouts(starts, shape, i, cp, nano_batches)
        for i in range(shape.microbatches)
    ]
    batches = [
        torch.arange(rank * size, (rank + 1) * size).view(shape.rows, -1)
        for rank in range(dp)
    ]

    def redistribute(number: int, placement: Placement) -> tuple[Any, ...]:
        tokens = batches[number % (dp * cp) // cp]
        labels = torch.where(tokens % 5 == 0, IGNORED, tokens + 1)
        placed = placement.choose(given, np.concatenate(starts) % shape.seq_len)
        halves = zip(tokens.chunk(2), labels.chunk(2), strict=True)
        positions = [{"positions": half % 7} if own else {} for half in tokens.chunk(2)]
        step = [
            ({"input": half, **more}, targets)
            for (half, targets), more in zip(halves, positions, strict=True)
        ]
        parcel = placement.pack(given, placed, shape, step)
        assert parcel is not None
        return placed, parcel.unpack(placement.exchange(parcel))

    placements = connected(topology)
    with ThreadPoolExecutor(len(placements)) as pool:
        every = list(pool.map(redistribute, range(len(placements)), placements))
    for rank, (placed, redistributed) in enumerate(every):
        # whole rows, whatever the context-parallel rank
        _, replica = every[rank - rank % cp]
        for (inputs, labels), (replica_inputs, _) in zip(
            redistributed, replica, strict=True
        ):
            tokens = inputs["input"]
            assert torch.equal(tokens, replica_inputs["input"])
            assert torch.equal(
                inputs[POSITIONS], (tokens % 7 if own else tokens % 64).int()
            )
            assert torch.equal(
                labels, torch.where(tokens % 5 == 0, IGNORED, tokens + 1)
            )
        total, worst = moved_bytes(placed, KINDS).T
        assert worst[1] < worst[0]
        assert total[1] <= 1.03 * total[0]
    first, second = (
        torch.cat(
            [
                every[rank][1][batch][0]["input"].flatten()
                for rank in range(0, dp * cp, cp)
            ]
        )
        for batch in (0, 1)
    )
    assert torch.equal(
        torch.cat([first, second]).sort().values, torch.arange(dp * size)
    )
    assert topology.pp > 1 or (first % size >= size // 2).any(), (
        "no document came from the other batch"
    )


def test_batches_whose_homes_are_kept_are_not_exchanged():
    """There are no peers here, for which an exchange would wait."""
    starts, shape = [np.array([0]), np.array([0])], BatchShape(1, 64, 1)
    placement = Placement(
        None, None, Topology(1, 2, 1, 1), 0, PlannerConfig(), KINDS, None
    )
    layouts = [[group_layout(starts, shape, 0, 1)]]
    placed = placement.choose(layouts, np.zeros(2, np.int64))
    assert placed[0].layouts[0] is layouts[0][0]
    batches = [({"input": torch.zeros(1, 64)}, torch.zeros(1, 64))]
    assert placement.pack(layouts, placed, shape, batches) is None


def test_replicas_with_other_homes_are_an_error_on_all():
    """A replica that has nothing to redistribute differs, too."""
    shape, inputs = (
        BatchShape(1, 64, 1),
        {"input": torch.zeros(1, 64, dtype=torch.int64)},
    )
    layouts = [
        [group_layout([np.array([0]), np.arange(0, 64, at)], shape, 0, 1)]
        for at in (4, 8)
    ]
    placements = connected(Topology(1, 2, 1, 1), replicas=True)

    def redistribute(placement: Placement, layout: list[TokenLayout] | None) -> Any:
        placed = placement.choose([layout], np.zeros(32, np.int64)) if layout else None
        return placement.pack(
            [layout or []], placed, shape, [(inputs, inputs["input"])]
        )

    with ThreadPoolExecutor(2) as pool:
        for layout in (layouts[0], None):
            for each in [
                pool.submit(redistribute, placement, layout) for placement in placements
            ]:
                each.result()
        for other in (layouts[1], None):
            for each in [
                pool.submit(redistribute, *args)
                for args in zip(placements, (layouts[0], other), strict=True)
            ]:
                with refusal(error=PlanMismatchError):
                    each.result()


def test_speeds_and_nodes_of_a_whole_pipeline_say_nothing_of_a_stage():
    config = PlannerConfig(
        rank_speeds=(1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        ranks_per_node=4,
    )
    assert _of_one_stage(config, 6) == PlannerConfig()
    assert _of_one_stage(config, 4) == PlannerConfig(ranks_per_node=4)


def test_batches_that_cannot_be_redistributed_are_refused():
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    check_redistributable({"input": tokens}, tokens)
    check_redistributable({"input": tokens, "positions": tokens.int()}, tokens)
    with refusal("cad.placement", remedy="cad.placement"):
        check_redistributable({"input": tokens, "positions": tokens.float()}, tokens)
    with refusal(remedy="cad.placement"):
        check_redistributable({"input": tokens, "pixels": tokens}, tokens)
    for labels in (tokens[:, :4], tokens.float()):
        with refusal("cad.placement", remedy="cad.placement"):
            check_redistributable({"input": tokens}, labels)
