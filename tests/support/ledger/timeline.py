"""When work on ledger devices would have run, had it taken time."""

from collections.abc import Sequence

DURATIONS = {"attention kernel": 4, "mm": 1, "all_to_all": 2}
"""any unit: of operators; all others take none"""


def main_stream_idles(history: Sequence[str]) -> list[tuple[float, float]]:
    """The waits of stream 0 that take time: how much of its attention has run before, from 0 to 1, and how long.

    Args:
        history: what ``torch.ops.ledger.history`` returns.
    """
    kernels = history.count("attention kernel on 0")
    now: dict[str, float] = {}
    events: dict[str, float] = {}
    idles, done = [], 0
    for line in history:
        what, stream = line.rsplit(" on ", 1)
        clock = now.get(stream, 0.0)
        if what.startswith("record e"):
            events[what.removeprefix("record ")] = clock
        elif what.startswith("wait "):
            until = max(clock, events.get(what.removeprefix("wait "), 0.0))
            if stream == "0" and until > clock:
                idles.append((done / kernels, until - clock))
            now[stream] = until
        else:
            now[stream] = clock + DURATIONS.get(what, 0)
            done += line == "attention kernel on 0"
    return idles
