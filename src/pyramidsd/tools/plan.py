"""Predict, before any download, how fast a chain of models will be, which windows it wants, and what a level adds."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pyramidsd.tools.contest import PEERS
from pyramidsd.tools.expectation import Cost, Curve, Stage, expected_seconds, expected_tokens, long_run_rate
from pyramidsd.tools.records import Line, read_record
from pyramidsd.tools.summary import passes_of, rows, stats_of
from pyramidsd.tools.terminal import busy, out
from pyramidsd.types import UsageError

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32)
"""The windows that are tried where none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--sizes", metavar="A,B,...", help="parameters of the models, lowest first, such as 1B,3B,8B")
    parser.add_argument("--times", metavar="A,B,...", help="milliseconds of a one-token forward, lowest first, instead")
    parser.add_argument("--acceptance", metavar="A,B,...", help="share kept at each boundary, lowest first, 0 to 1")
    parser.add_argument("--bandwidth", type=float, default=1008, metavar="GB/S", help="of the memory; default 1008")
    parser.add_argument("--tflops", type=float, default=165, metavar="N", help="of the device; default 165")
    parser.add_argument("--bytes", type=float, default=2, metavar="N", help="per parameter; default 2")
    parser.add_argument(
        "--windows", metavar="A,B,...", help="drafted tokens per boundary, lowest first; default the best"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--record", type=Path, metavar="FILE", help="check the prediction against what bench measured")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Predict, and say whether a further level pays."""
    report = _from_record(args.record) if args.record is not None else _from_numbers(args)
    if args.json:
        print(json.dumps(report))  # noqa: T201
        return 0
    out.print(_record_table(report["rows"]) if args.record is not None else _chain_table(report["rows"]))
    out.print(report["verdict"])
    return 0


# From sizes or times


@dataclass(frozen=True, slots=True)
class Planned:
    """A model of the plan.

    Attributes:
        name: as given.
        cost: seconds of a forward over so many tokens.
        gigabytes: of its weights; None where only its time is known.
    """

    name: str
    cost: Cost
    gigabytes: float | None


def _from_numbers(args: argparse.Namespace) -> dict[str, Any]:
    models = _models(args)
    boundaries = len(models) - 1
    acceptance = _numbers("acceptance", args.acceptance, boundaries) if boundaries else []
    if any(not 0 <= value <= 1 for value in acceptance):
        raise UsageError(f"acceptance must lie in [0, 1], got {args.acceptance}")
    windows = None
    if args.windows is not None:
        windows = [int(value) for value in _numbers("windows", args.windows, boundaries)]
        if any(window < 1 for window in windows):
            raise UsageError(f"a window must hold at least 1 token, got {args.windows}")
    if args.max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, got {args.max_new_tokens}")
    with busy("Planning"):
        table = [_chain(models, chain, acceptance, windows, args.max_new_tokens) for chain in _chains(len(models))]
    table = [row | {"speedup_over_plain": row["tokens_per_second"] / table[0]["tokens_per_second"]} for row in table]
    return {"rows": table, "verdict": _verdict(table)}


def _models(args: argparse.Namespace) -> list[Planned]:
    if (args.sizes is None) == (args.times is None):
        raise UsageError("give either --sizes, such as 1B,3B,8B, or --times in milliseconds, lowest first; or --record")
    if args.times is not None:
        times = _numbers("times", args.times)
        if min(times) < 0 or times[-1] <= 0:
            raise UsageError(f"times are milliseconds above 0, got {args.times}")
        return [Planned(f"{time:g} ms", _flat(time / 1e3), None) for time in times]
    return [_sized(size.strip(), args) for size in args.sizes.split(",")]


def _flat(seconds: float) -> Cost:
    return lambda _width: seconds


def _sized(size: str, args: argparse.Namespace) -> Planned:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", size, re.IGNORECASE)
    if not found:
        raise UsageError(f"a size is a number and M or B, such as 135M or 1.5B, got {size!r}")
    parameters = float(found[1]) * (1e9 if found[2] in "bB" else 1e6)
    if min(parameters, args.bandwidth, args.tflops, args.bytes) <= 0:
        raise UsageError("sizes, bandwidth, tflops and bytes must be above 0")
    reading = parameters * args.bytes / (args.bandwidth * 1e9)
    computing = 2 * parameters / (args.tflops * 1e12)
    return Planned(size, lambda width: max(reading, width * computing), parameters * args.bytes / 1e9)


def _numbers(name: str, text: str | None, count: int | None = None) -> list[float]:
    try:
        values = [float(value) for value in (text or "").split(",")]
    except ValueError:
        raise UsageError(f"--{name} must be numbers with commas between them, got {text!r}") from None
    if count is not None and len(values) != count:
        raise UsageError(f"{count + 1} models have {count} boundaries, but --{name} has {len(values)} numbers")
    return values


def _chains(count: int) -> list[tuple[int, ...]]:
    """All ways to leave out lower models, plain decoding first."""
    target = count - 1
    return [(*lower, target) for size in range(count) for lower in combinations(range(target), size)]


def _chain(
    models: Sequence[Planned],
    chain: Sequence[int],
    acceptance: Sequence[float],
    windows: Sequence[int] | None,
    tokens: int,
) -> dict[str, Any]:
    # A token that skips a level must satisfy all the boundaries in between.
    shares = [prod(acceptance[low:high]) for low, high in pairwise(chain)]
    stages = [Stage(models[chain[0]].cost)]
    stages += [Stage(models[i].cost, 4, (share,)) for i, share in zip(chain[1:], shares, strict=True)]
    stages = best_windows(stages) if windows is None else _with_windows(stages, [windows[i] for i in chain[:-1]])
    weights = [models[i].gigabytes for i in chain]
    return {
        "chain": [models[i].name for i in chain],
        "num_draft_tokens": [stage.window for stage in stages[1:]],
        "acceptance": shares,
        "tokens_per_second": tokens / expected_seconds(stages, tokens),
        "tokens_per_target_pass": expected_tokens(stages[-1]),
        "fit_formula_tokens_per_second": fit_formula(stages),
        "weights_gigabytes": None if None in weights else sum(weight for weight in weights if weight is not None),
    }


def _with_windows(stages: Sequence[Stage], windows: Sequence[int]) -> list[Stage]:
    return [stages[0], *(replace(stage, window=w) for stage, w in zip(stages[1:], windows, strict=True))]


def best_windows(stages: Sequence[Stage], largest: Sequence[int] | None = None) -> list[Stage]:
    """`stages` with the windows of `WINDOWS` that make them fastest in the long run, one boundary after the other until
    none helps; none above `largest`, where acceptance is known no further."""
    windows = [stage.window for stage in stages[1:]]
    settled = not windows
    while not settled:
        before = list(windows)
        for i in range(len(windows)):
            allowed = WINDOWS if largest is None else (*(w for w in WINDOWS if w < largest[i]), largest[i])
            tried = {w: long_run_rate(_with_windows(stages, [*windows[:i], w, *windows[i + 1 :]])) for w in allowed}
            windows[i] = max(tried, key=tried.__getitem__)
        settled = windows == before
    return _with_windows(stages, windows)


def fit_formula(stages: Sequence[Stage]) -> float:
    """Tokens per second by the formula of PyramidSD (arXiv 2510.12966), V = b (l + 1) / (l / V_below + 1 / V_own) at
    each boundary with acceptance b. It is a device for fitting curves, not an expectation; shown for comparison."""
    rate = 1 / stages[0].seconds(1) if stages[0].seconds(1) else float("inf")
    for stage in stages[1:]:
        rate = stage.kept(0) * (stage.window + 1) / (stage.window / rate + stage.seconds(1))
    return rate


def _verdict(table: Sequence[Mapping[str, Any]]) -> str:
    best = max(table, key=lambda row: row["tokens_per_second"])
    if len(best["chain"]) == 1:
        return f"Plain decoding of {best['chain'][-1]} is expected to be fastest: no level pays."
    shorter = max(row["tokens_per_second"] for row in table if len(row["chain"]) < len(best["chain"]))
    gain = best["tokens_per_second"] / shorter
    windows = ", ".join(map(str, best["num_draft_tokens"]))
    return (
        f"{' < '.join(best['chain'])} with windows {windows} is expected to be fastest: "
        f"{best['speedup_over_plain']:.2f} times plain decoding, {gain:.2f} times the best chain with fewer levels."
    )


def _chain_table(table: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(
        "chain", "windows", "acceptance", "tokens/s", "over plain", "per pass", "paper's formula", "weights, GB"
    )
    for row in table:
        shown.add_row(
            Text(" < ".join(row["chain"])),
            " ".join(map(str, row["num_draft_tokens"])) or "-",
            " ".join(f"{share:.2f}" for share in row["acceptance"]) or "-",
            f"{row['tokens_per_second']:.2f}",
            f"{row['speedup_over_plain']:.2f}",
            f"{row['tokens_per_target_pass']:.2f}",
            f"{row['fit_formula_tokens_per_second']:.2f}",
            "-" if row["weights_gigabytes"] is None else f"{row['weights_gigabytes']:.1f}",
        )
    shown.caption = "weights only; the key-value caches come on top"
    return shown


# From a record


def _from_record(path: Path) -> dict[str, Any]:
    lines = read_record(path)
    answers = [line for line in lines if line["kind"] == "answer"]
    if not answers:
        raise UsageError(f"{path} has no answers yet; run bench first")
    settings = [line for line in lines if line["kind"] == "run"][-1]["settings"]
    curves = _curves(settings, answers)
    measured = {row["setting"]: row for row in rows(settings, answers)}
    with busy("Planning"):
        table = [
            _checked(setting, measured[setting["name"]], answers, curves)
            for setting in settings
            if setting["name"] in measured and setting["method"] not in PEERS
        ]
    if not table:
        raise UsageError(f"{path} holds only baselines of transformers; bench a method of this library")
    worst = max(abs(row["error"]) for row in table)
    best = max(table, key=lambda row: row["best_tokens_per_second"])
    return {
        "rows": table,
        "worst_error": worst,
        "verdict": f"Predicted within {worst:.0%} of what was measured. Expected to be fastest: {best['setting']} with "
        f"windows {best['best_num_draft_tokens']}, {best['best_tokens_per_second']:.2f} tokens/s.",
    }


def _curves(settings: Sequence[Line], answers: Sequence[Line]) -> dict[str, Cost | None]:
    """What a forward of each model costs, over all settings that use it; None where no model stands behind a name."""
    passes: dict[str, list[tuple[int, int, float]]] = {}
    for setting in settings:
        own = [answer for answer in answers if answer["setting"] == setting["name"]]
        for model, entries in zip(setting["models"], passes_of(own), strict=False):
            passes.setdefault(model, []).extend(entries)
    return {model: Curve.of(entries) if entries else None for model, entries in passes.items()}


def _checked(
    setting: Line, row: Mapping[str, Any], all_answers: Sequence[Line], curves: Mapping[str, Cost | None]
) -> dict[str, Any]:
    answers = [answer for answer in all_answers if answer["setting"] == setting["name"]]
    stages = measured_stages(setting, answers, curves)
    per_token = 1 / (1 - row["overhead"])
    # Totals: a mean of speeds would favour easy answers, of which pooled acceptance knows nothing.
    tokens = sum(len(answer["token_ids"]) for answer in answers)
    measured = tokens / sum(answer["seconds"] for answer in answers)
    seconds = sum(_answer_seconds(stages, answer) for answer in answers)
    predicted = tokens / (seconds * per_token)
    best = best_windows(stages, setting["num_draft_tokens"])
    saved = tokens / long_run_rate(stages) - tokens / long_run_rate(best)  # prompts cost what they cost
    return {
        "setting": setting["name"],
        "measured_tokens_per_second": measured,
        "predicted_tokens_per_second": predicted,
        "error": predicted / measured - 1,
        "tokens_per_target_pass": expected_tokens(stages[-1]),
        "best_num_draft_tokens": [stage.window for stage in best[1:]],
        "best_tokens_per_second": tokens / ((seconds - saved) * per_token),
    }


def measured_stages(setting: Line, answers: Sequence[Line], curves: Mapping[str, Cost | None]) -> list[Stage]:
    """The levels of a setting with the acceptance, position by position, that some answers showed."""
    stats = stats_of(answers)
    stages = [Stage(curves[setting["models"][0]])]
    for model, window, below, own in zip(
        setting["models"][1:], setting["num_draft_tokens"], stats[:-1], stats[1:], strict=True
    ):
        # Positions that few drafts reach are too noisy to stand for themselves.
        kept = [k / n for k, n in zip(own.accepted_at, own.proposed_at, strict=True) if n >= _ENOUGH]
        shares = tuple(here / before for before, here in pairwise([1.0, *kept]) if before > 0) or (own.acceptance,)
        drafts_itself = below.forwards > 0
        asked = own.forwards - sum(1 for _ in answers)  # the last pass of an answer often has no room for a draft
        found = own.proposed_at[0] if own.proposed_at else 0
        supply = 1.0 if drafts_itself or asked < 1 else min(1.0, found / asked)
        stages.append(Stage(curves[model], window, shares, supply))
    return stages


_ENOUGH = 10


def _answer_seconds(stages: Sequence[Stage], answer: Line) -> float:
    """Expected seconds of one answer, the reading of its prompts included."""
    window = stages[-1].window
    prompts = [width - window for width, count, _ in answer["passes"][-1] for _ in range(count) if width > window + 3]
    turns = prompts or [1]
    share, rest = divmod(len(answer["token_ids"]), len(turns))
    lengths = [share + (i < rest) for i in range(len(turns))]
    return sum(expected_seconds(stages, n, max(1, prompt)) for n, prompt in zip(lengths, turns, strict=True))


def _record_table(table: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("setting", "measured", "predicted", "error", "best windows", "then")
    for row in table:
        shown.add_row(
            Text(row["setting"]),
            f"{row['measured_tokens_per_second']:.2f}",
            f"{row['predicted_tokens_per_second']:.2f}",
            f"{row['error']:+.1%}",
            " ".join(map(str, row["best_num_draft_tokens"])) or "-",
            f"{row['best_tokens_per_second']:.2f}",
        )
    shown.caption = "all tokens over all seconds, prompts included; windows no larger than those measured"
    return shown
