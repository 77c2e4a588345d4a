"""Text that `advise` prints: a verdict, a table and keys to paste."""

from __future__ import annotations

import json
from typing import Any

from torchtitan_cad.simulation.advice import Advice, Choice, Trial

FIELDS = {
    "cad.nano_batches": "nano_batches",
    "cad.tolerance": "tolerance",
    "cad.backward": "backward",
    "cad.ranks_per_node": "ranks_per_node",
    "cad.placement": "placement",
    "cad.recompute_attention": "checkpointing",
    "activation_checkpoint.mode": "checkpointing",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.pipeline_parallel_schedule": "schedule",
}
"""The field of a choice that a key stands for; of several keys the last names it."""

REASONS: dict[str, dict[Any, str]] = {
    "cad.backward": {
        "keep": "Q, K and V travel once, and there is memory for them",
        "resend": "servers need not keep what they received",
    },
    "cad.nano_batches": {
        1: "the exchange is shown, but each rank works on whole microbatches",
        2: "the exchange of one half hides behind the other half's work",
    },
    "cad.placement": {
        "auto": "tokens are dealt to ranks such that none has much to send or receive",
        "loader": "ranks keep what their loaders gave them",
    },
    "cad.recompute_attention": {
        False: "backward computes linear work again, but neither attention nor its exchanges",
        True: "nothing less fits",
    },
    "parallelism.pipeline_parallel_schedule": {
        "CAD1F1B": "stages share attention, and idle ones serve",
        "1F1B": "attention stays inside a stage",
    },
    "activation_checkpoint.mode": {
        "none": "it fits without computing anything again",
        "selective": "as little as fits is computed again",
        "full": "nothing less fits",
    },
}
"""Why a key has a value."""

WHOLE = ("activation_checkpoint.mode",)
"""Keys that say nothing without their section."""

BASE = "gains are over this"
LEFT = "not taken: "

KEPT = {
    "training.local_batch_size": "keeps the tokens of a step",
    "training.global_batch_size": "keeps the tokens of a step",
    "parallelism.pipeline_parallel_microbatch_size": "rows of a microbatch",
    "parallelism.data_parallel_shard_degree": "what the other degrees leave",
    "activation_checkpoint.selective_ac_option": "keeps attention's output",
    "parallelism.context_parallel_degree": "ranks that share a row; a microbatch keeps its tokens",
    "parallelism.pipeline_parallel_degree": "stages",
}


def keys_by_field() -> dict[str, str]:
    """Map every field of a choice to the key that sets it; of the keys of microbatches, to one."""
    return {field: key for key, field in FIELDS.items()} | {"microbatches": "training.local_batch_size"}


def verdict(advice: Advice) -> str:
    """Say in one line whether CAD is worth it for the job."""
    best, without = advice.best, advice.without
    if advice.speedup is None:
        if best.seconds is not None:
            return f"worth it: without cad the job does not fit, it {without.reason}; with cad {_step(best)}"
        if without.seconds is None:
            return f"not worth it: nothing that was tried fits; the job {best.reason}"
        return f"not worth it: with cad nothing that was tried fits; the job {best.reason}"
    word = "worth it" if advice.worth_it else "not worth it"
    return (
        f"{word}: {advice.speedup:.2f}x as fast as without cad ({_step(best)} instead of {_step(without)}; predicted, "
        "not measured)"
    )


def table(advice: Advice) -> str:
    """Return every setting that was tried: its value, what it gains alone, and the memory of the fullest GPU."""
    slowest = max(trial.seconds or 0.0 for trial in (advice.without_written, advice.written, advice.base))
    scale, unit = (1.0, "s/step") if slowest >= 1 or not slowest else (1e3, "ms/step")
    rows = [["setting", "value", unit, "gain", "GB", ""]]
    rows.append(_row(scale, "without cad", "as written", advice.without_written, advice, "torchtitan alone"))
    rows.append(_row(scale, "without cad", _value(advice.without.choice, advice), advice.without, advice, "its best"))
    given = advice.base is advice.written
    rows.append(_row(scale, "with cad", "as written", advice.written, advice, BASE if given else ""))
    if not given:
        rows.append(_row(scale, "with cad", _value(advice.base.choice, advice), advice.base, advice, BASE))
    taken = advice.best.choice.changes(advice.base.choice)
    reasons: dict[str, int] = {}

    def impossible(trial: Trial) -> str:
        return f"not possible ({reasons.setdefault(trial.reason, len(reasons) + 1)})"

    for name, trials in advice.trials.items():
        parts = [t.choice.changes(advice.base.choice) for t in trials]
        most = max((len(changes) for changes in parts if changes.items() <= taken.items()), default=0)
        for trial in trials:
            changes = trial.choice.changes(advice.base.choice)
            note = "taken" if len(changes) == most and changes.items() <= taken.items() else ""
            if trial.choice in advice.beside and not note:
                beside = advice.beside[trial.choice]
                gain = beside.gain_over(advice.best)
                note = LEFT + (impossible(beside) if gain is None else f"{100 * gain:+.1f} %") + " beside those taken"
            if trial.seconds is None and not trial.memory:
                note = impossible(trial)
            first, *others = sorted(changes, key=lambda field: field != name)
            value = ", ".join([_text(changes[first]), *(f"{field} {_text(changes[field])}" for field in others)])
            key = keys_by_field()[name]
            setting = key if key in WHOLE else key.split(".")[1]
            rows.append(_row(scale, setting, value, trial, advice, note))
    if taken:
        rows.append(_row(scale, "all taken", _listed(taken), advice.best, advice, "together"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 1, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *(f"({number}) {reason}" for reason, number in reasons.items())])


def snippet(advice: Advice, keys: dict[str, Any]) -> str:
    """Write these keys as TOML, with the reason for each."""
    tables: dict[str, list[str]] = {}
    for key, value in keys.items():
        owner, name = key.split(".")
        if value is None:
            text = f"# leave {name} out  # {_reason(advice, key, value)}"
        else:
            text = f"{name} = {json.dumps(value)}  # {_reason(advice, key, value)}"
        tables.setdefault(owner, []).append(text)
    lines = [] if keys else ["# nothing to change: no setting gains 1 %"]
    for owner, texts in tables.items():
        lines += [f"[{owner}]", *texts]
    return "\n".join(lines)


def _reason(advice: Advice, key: str, value: Any) -> str:
    if key == "parallelism.cad":
        return verdict(advice).partition(" (")[0]
    field = FIELDS.get(key, "")
    before = getattr(advice.written.choice, field, None)
    if key == "cad.tolerance":
        if value == "auto":
            why = "of every batch the imbalance at which a layer takes the least time"
        else:
            why = (
                "less balance for fewer bytes"
                if before != "auto" and value > before
                else "more even, as bytes are hidden"
            )
    elif key == "cad.ranks_per_node":
        why = "plans keep bytes inside nodes" if value else "plans may send more bytes between nodes"
    else:
        why = REASONS.get(key, {}).get(value) or KEPT[key]
    if not advice.worth_it or field not in advice.best.choice.changes(advice.base.choice):
        return why
    worth = advice.worth.get(field)
    if field in advice.worth:
        why += (
            "; without it the rest is refused or does not fit"
            if worth is None
            else f"; without it {100 * worth:.0f} % longer"
        )
    return why


def _row(scale: float, setting: str, value: str, trial: Trial, advice: Advice, note: str) -> list[str]:
    gain = trial.gain_over(advice.base)
    seconds = "-" if trial.seconds is None else f"{scale * trial.seconds:.3f}"
    if trial.seconds is None:
        note = trial.reason if trial.memory else note
    memory = f"{trial.memory / 1e9:.1f}" if trial.memory else "-"
    return [setting, value, seconds, "-" if gain is None else f"{100 * gain:+.1f} %", memory, note]


def _value(choice: Choice, advice: Advice) -> str:
    return _listed(choice.changes(advice.written.choice)) or "as written"


def _listed(changes: dict[str, Any]) -> str:
    return ", ".join(f"{field} {_text(value)}" for field, value in changes.items())


def _text(value: Any) -> str:
    return {None: "left out", "linear": "full, attention kept"}.get(value, str(value))


def _step(trial: Trial) -> str:
    seconds = trial.seconds or 0.0
    return f"{seconds:.3f} s a step" if seconds >= 1 else f"{1e3 * seconds:.3g} ms a step"
