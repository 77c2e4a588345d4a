# SPDX-License-Identifier: BSD-3-Clause
"""JSON form of a layout: {"attention": {...}, "ranks": [[{"doc", "start", "length"}, ...], ...]}.

A segment whose tokens are keys only also has "attends": false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.files import read_json
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.text import brief, printable

_KIND_NAMES = {
    dict: "an object",
    list: "a list",
    int: "an integer",
    bool: "true or false",
}
_OPTIONAL = {
    field.name: field.default
    for field in fields(AttentionShape)
    if field.default is not MISSING
}
"""Keys of "attention" that may be left out, with their values then."""
_SEGMENT_KEYS = ("doc", "start", "length", "attends")


def require(data: Any, key: str, kind: type) -> Any:
    """Return ``data[key]``. Raises ValueError naming the key if it is missing or not of type ``kind``."""
    if not isinstance(data, dict) or key not in data:
        raise ValueError(f"missing key {key!r} in {brief(data)}")
    value = data[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key!r} must be {_KIND_NAMES[kind]}, got {brief(value)}")
    return value


def refuse_unknown(data: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ValueError for a key that is not among ``known``."""
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(
            f"unknown key {brief(unknown[0])} in {where}: set {', '.join(known)}"
        )


def shape_from_dict(data: Any) -> AttentionShape:
    """Return the shape of the key "attention". Raises ValueError naming a key that is missing, unknown or wrong."""
    attention = require(data, "attention", dict)
    names = [field.name for field in fields(AttentionShape)]
    refuse_unknown(attention, names, "'attention'")
    keys = [name for name in names if name in attention or name not in _OPTIONAL]
    return AttentionShape(**{name: require(attention, name, int) for name in keys})


def layout_from_dict(data: Any) -> TokenLayout:
    """Return the layout of the key "ranks". Raises ValueError naming a key that is missing, unknown or wrong."""
    ranks = []
    attends = []
    for rank, segments in enumerate(require(data, "ranks", list)):
        if not isinstance(segments, list):
            raise ValueError(
                f"'ranks'[{rank}] must be a list of segments, got {brief(segments)}"
            )
        try:
            ranks.append(
                [
                    tuple(require(s, key, int) for key in _SEGMENT_KEYS[:3])
                    for s in segments
                ]
            )
            for segment in segments:
                refuse_unknown(segment, _SEGMENT_KEYS, "a segment")
                attends.append(
                    require(segment, "attends", bool) if "attends" in segment else True
                )
        except ValueError as error:
            raise ValueError(f"'ranks'[{rank}]: {error}") from None
    return TokenLayout.from_segments(ranks, attends)


def read_layout(path: Path) -> tuple[TokenLayout, AttentionShape]:
    """Read a layout file. Raises ValueError naming it, and a key that is missing, unknown or wrong."""
    data = read_json(path)
    try:
        layout = layout_from_dict(data)
        shape = shape_from_dict(data)
        refuse_unknown(data, ("attention", "ranks"), "a layout")
    except ValueError as error:
        raise ValueError(f"{printable(path)}: {error}") from None
    return layout, shape


def layout_to_dict(layout: TokenLayout, shape: AttentionShape) -> dict[str, Any]:
    """Return the content of a layout file."""
    ranks: list[list[dict[str, Any]]]
    ranks = [
        [{"doc": d, "start": s, "length": n} for d, s, n in segments]
        for segments in layout.segments()
    ]
    for segment, attends in zip(
        chain.from_iterable(ranks), layout.seg_attends, strict=True
    ):
        if not attends:
            segment["attends"] = False
    attention = {
        name: value
        for name, value in asdict(shape).items()
        if value != _OPTIONAL.get(name, ...)
    }
    return {"attention": attention, "ranks": ranks}
