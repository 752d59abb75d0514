"""Figures from answers: medians with quartiles, Spec-Bench's speed-up, and what may be called a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from pyramidsd.types import Stats, add_stats

Line = Mapping[str, Any]
CONFIDENCE = 0.95


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """An interval that holds the median of where `values` come from with at least this probability, whatever their law
    is: two order statistics, chosen by the binomial law of the number of values below the median. None where there are
    too few values, fewer than 6 at 95 %."""
    ordered, n = sorted(values), len(values)
    tail, low = 0.0, -1
    for i in range(n // 2):
        tail += math.comb(n, i) / 2**n
        if 2 * tail > 1 - confidence:
            break
        low = i
    return None if low < 0 else (ordered[low], ordered[n - 1 - low])


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def stats_of(lines: Sequence[Line]) -> tuple[Stats, ...]:
    """The counters of some answers, level by level."""
    total: tuple[Stats, ...] = ()
    for line in lines:
        read = [
            Stats(**{**s, "proposed_at": (*s["proposed_at"],), "accepted_at": (*s["accepted_at"],)})
            for s in line["stats"]
        ]
        total = add_stats(total, read)
    return total


def speed(line: Line) -> float:
    """Tokens per second of one answer."""
    return float(len(line["token_ids"]) / line["seconds"])


def rows(settings: Sequence[Line], answers: Sequence[Line], baseline: str | None = None) -> list[dict[str, Any]]:
    """One row per setting, in order; settings without answers are left out.

    `speedup_over_plain` is Spec-Bench's (arXiv 2401.07851): the mean over answers of tokens per second, over the same
    mean of plain decoding. `paired` is the median of the ratios of answers to the same prompt in the same round, with
    its interval; `differs` says that the interval leaves out 1.

    Args:
        settings: their lines in the record.
        answers: answer lines, of any settings.
        baseline: the name of the setting that the others are compared with; `plain` where it was run, else `hf-plain`.
    """
    by_setting: dict[str, list[Line]] = {setting["name"]: [] for setting in settings}
    for answer in answers:
        by_setting.setdefault(answer["setting"], []).append(answer)
    if baseline is None:
        baseline = next((name for name in ("plain", "hf-plain") if by_setting.get(name)), "")
    plain = by_setting.get(baseline, [])
    return [_row(setting, by_setting[setting["name"]], plain) for setting in settings if by_setting[setting["name"]]]


def _row(setting: Line, answers: Sequence[Line], plain: Sequence[Line]) -> dict[str, Any]:
    speeds = [speed(answer) for answer in answers]
    tokens = sum(len(answer["token_ids"]) for answer in answers)
    seconds = sum(answer["seconds"] for answer in answers)
    deviation = [value for answer in answers for value in answer["deviation"]]
    stats = stats_of(answers)
    low, middle, high = quartiles(speeds)
    forward_seconds = [sum(total for _, _, total in widths) for widths in passes_of(answers)]
    forwards = [sum(count for _, count, _ in widths) for widths in passes_of(answers)]
    return {
        "method": setting["method"],
        "setting": setting["name"],
        "models": setting["models"],
        "num_draft_tokens": setting["num_draft_tokens"],
        "thresholds": setting["thresholds"],
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_second": middle,
        "quartiles": [low, high],
        "mean_tokens_per_second": fmean(speeds),
        **_against(answers, plain),
        "tokens_per_target_pass": tokens / forwards[-1],
        "acceptance": [level.acceptance for level in stats[1:]],
        "acceptance_at": [_shares(level) for level in stats[1:]],
        "deviation": fmean(deviation) if deviation else None,
        "worst_deviation": max(deviation, default=None),
        "overhead": 1 - sum(forward_seconds) / seconds,
        "forward_share": [value / seconds for value in forward_seconds],
        "seconds_per_forward": [
            value / count if count else None for value, count in zip(forward_seconds, forwards, strict=True)
        ],
        "megabytes": setting.get("megabytes"),
    }


def passes_of(answers: Sequence[Line]) -> list[list[tuple[int, int, float]]]:
    """For each model, lowest first, all its (width in tokens, forwards, seconds) in some answers."""
    return [[(*entry,) for widths in column for entry in widths] for column in _columns(answers, "passes")]


def _columns(answers: Sequence[Line], key: str) -> list[Any]:
    return list(zip(*(answer[key] for answer in answers), strict=True))


def _shares(level: Stats) -> list[float]:
    return [kept / seen for kept, seen in zip(level.accepted_at, level.proposed_at, strict=True)]


def _against(answers: Sequence[Line], plain: Sequence[Line]) -> dict[str, Any]:
    """How the answers compare with those of plain decoding."""
    of_plain = {(answer["prompt"], answer["round"]): answer for answer in plain}
    pairs = [(answer, of_plain[key]) for answer in answers if (key := (answer["prompt"], answer["round"])) in of_plain]
    if not pairs:
        return {"speedup_over_plain": None, "paired": None, "interval": None, "differs": None, "same_as_plain": None}
    ratios = [speed(answer) / speed(other) for answer, other in pairs]
    interval = median_interval(ratios)
    return {
        "speedup_over_plain": fmean(speed(a) for a, _ in pairs) / fmean(speed(b) for _, b in pairs),
        "paired": median(ratios),
        "interval": interval,
        "differs": None if interval is None else not interval[0] <= 1 <= interval[1],
        "same_as_plain": fmean(answer["token_ids"] == other["token_ids"] for answer, other in pairs),
    }
