import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cad.runtime.tables import build_waves

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 8), max_size=40))
def test_waves_visit_every_partial_once_in_order_with_distinct_rows(targets: list[int]) -> None:
    array = np.array(targets, dtype=np.int64)
    waves = build_waves(array, CPU)
    seen: dict[int, list[int]] = {}
    for wave in waves:
        assert len(set(wave.target.tolist())) == len(wave.target)
        for source, target in zip(wave.source.tolist(), wave.target.tolist(), strict=True):
            assert array[source] == target
            seen.setdefault(target, []).append(source)
    assert seen == {t: [i for i, other in enumerate(targets) if other == t] for t in targets}
