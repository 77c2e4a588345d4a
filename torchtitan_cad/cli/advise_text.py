"""Text that `advise` prints: a verdict, a table and keys to paste."""

from __future__ import annotations

import json
from typing import Any

from torchtitan_cad.planning.text import aligned
from torchtitan_cad.simulation import Advice, Configuration, Trial

KEYS = {
    "nano_batches": "cad.nano_batches",
    "tolerance": "cad.tolerance",
    "backward": "cad.backward",
    "ranks_per_node": "cad.ranks_per_node",
    "placement": "cad.placement",
    "checkpointing": "activation_checkpoint.mode",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "microbatches": "training.local_batch_size",
}
"""Field of a configuration: the key that sets it, or the first of several."""

REASONS: dict[str, Any] = {
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
    "cad.ranks_per_node": {None: "plans may send more bytes between nodes"},
    "cad.recompute_attention": {
        False: "backward computes linear work again, but neither attention nor its exchanges",
        True: "nothing less fits",
    },
    "cad.tolerance": {"auto": "of every batch the imbalance at which a layer takes the least time"},
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
KEPT = {
    "cad.tolerance": "imbalance against bytes",
    "cad.ranks_per_node": "plans keep bytes inside nodes",
    "training.local_batch_size": "keeps the tokens of a step",
    "training.global_batch_size": "keeps the tokens of a step",
    "parallelism.pipeline_parallel_microbatch_size": "rows of a microbatch",
    "parallelism.data_parallel_shard_degree": "what the other degrees leave",
    "activation_checkpoint.selective_ac_option": "keeps attention's output",
    "parallelism.context_parallel_degree": "ranks that share a row; a microbatch keeps its tokens",
    "parallelism.pipeline_parallel_degree": "stages",
}
"""Why a key has any other value."""

BASE = "gains are over this"


def verdict(advice: Advice) -> str:
    """Say in one line whether CAD is worth it for the job."""
    best, without = advice.best, advice.without
    if advice.speedup is None:
        if best.fits:
            return f"worth it: without cad the job does not fit, it {without.reason}; with cad {_step(best)}"
        what = "with cad nothing" if without.fits else "nothing"
        return f"not worth it: {what} that was tried fits; the job {best.reason}"
    word = "worth it" if advice.worth_it else "not worth it"
    return (
        f"{word}: {advice.speedup:.2f}x as fast as without cad ({_step(best)} instead of {_step(without)}; predicted, "
        "not measured)"
    )


def table(advice: Advice) -> str:
    """Return every setting that was tried: its value, what it gains alone, and the memory of the fullest GPU."""
    fitting = [each.seconds for each in (advice.without_written, advice.written, advice.base) if each.fits]
    scale, unit = (1e3, "ms/step") if fitting and max(fitting) < 1 else (1.0, "s/step")
    rows = [["setting", "value", unit, "gain", "GB", ""]]
    reasons: dict[str, int] = {}

    def add(setting: str, value: str, trial: Trial, note: str = "") -> None:
        if not trial.fits:
            number = reasons.setdefault(trial.reason, len(reasons) + 1)
            note = trial.reason if trial.memory else f"not possible ({number})"
        gain = trial.gain_over(advice.base)
        seconds = f"{scale * trial.seconds:.3f}" if trial.fits else "-"
        memory = f"{trial.memory / 1e9:.1f}" if trial.memory else "-"
        rows.append([setting, value, seconds, "-" if gain is None else f"{100 * gain:+.1f} %", memory, note])

    written, given = advice.written.configuration, advice.base is advice.written
    add("without cad", "as written", advice.without_written, "torchtitan alone")
    add("without cad", _changes(advice.without.configuration, written), advice.without, "its best")
    add("with cad", "as written", advice.written, BASE if given else "")
    base = advice.base.configuration
    if not given:
        add("with cad", _changes(base, written), advice.base, BASE)
    taken = advice.best.configuration.changes(base)
    for name, trials in advice.trials.items():
        changes = [trial.configuration.changes(base) for trial in trials]
        most = max((len(each) for each in changes if each.items() <= taken.items()), default=0)
        for trial, each in zip(trials, changes, strict=True):
            others = [f"{field} {_text(value)}" for field, value in sorted(each.items()) if field != name]
            setting = KEYS[name] if name == "checkpointing" else KEYS[name].split(".")[1]
            is_taken = len(each) == most and each.items() <= taken.items()
            add(setting, ", ".join([_text(each[name]), *others]), trial, "taken" if is_taken else "")
    if taken:
        add("all taken", _changes(advice.best.configuration, base), advice.best, "together")
    notes = [f"({number}) {reason}" for reason, number in reasons.items() if f"({number})" in str(rows)]
    return "\n".join([aligned(rows, (0, 1, 5)), *notes])


def snippet(advice: Advice, keys: dict[str, Any]) -> str:
    """Write these keys as TOML, with the reason for each."""
    tables: dict[str, list[str]] = {}
    for key, value in keys.items():
        owner, name = key.split(".")
        text = f"# leave {name} out" if value is None else f"{name} = {json.dumps(value)}"
        tables.setdefault(owner, []).append(f"{text}  # {_reason(advice, key, value)}")
    lines = [] if keys else ["# nothing to change: no setting gains 1 %"]
    for owner, texts in tables.items():
        lines += [f"[{owner}]", *texts]
    return "\n".join(lines)


def _reason(advice: Advice, key: str, value: Any) -> str:
    if key == "parallelism.cad":
        return verdict(advice).partition(" (")[0]
    why = REASONS.get(key, {}).get(value) or KEPT[key]
    fields = {each: name for name, each in KEYS.items()} | {"cad.recompute_attention": "checkpointing"}
    field = fields.get(key)
    if not advice.worth_it or field not in advice.worth:
        return why
    worth = advice.worth[field]
    return f"{why}; without it " + (
        "the rest is refused or does not fit" if worth is None else f"{100 * worth:.0f} % longer"
    )


def _changes(configuration: Configuration, base: Configuration) -> str:
    changes = configuration.changes(base).items()
    return ", ".join(f"{field} {_text(value)}" for field, value in changes) or "as written"


def _text(value: Any) -> str:
    return {None: "left out", "linear": "full, attention kept"}.get(value, str(value))


def _step(trial: Trial) -> str:
    return f"{trial.seconds:.3f} s a step" if trial.seconds >= 1 else f"{1e3 * trial.seconds:.3g} ms a step"
