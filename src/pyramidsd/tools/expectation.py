"""What a chain of models is expected to cost: the exact expectation over independent acceptances.

A level of window k that is to emit n tokens drafts d = min(k, n - 1) of them, keeps the first j with probability
a_1 ... a_j (1 - a_(j+1)) and adds one. Its drafter always delivers d tokens, so the number of tokens is a stopped
geometric sum, (1 - a^(d+1)) / (1 - a) for constant a, and what a round costs follows level by level. A model that is
behind, because its last draft was kept whole or because it has not read the prompt yet, is fed more tokens at once;
this is followed too, since a forward over two tokens can cost twice a forward over one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from pyramidsd.types import UsageError

Cost = Callable[[int], float]
"""Seconds of one forward over so many tokens."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost measured at some widths, linear between them, and past the last one as steep as before it.

    Attributes:
        widths: in tokens, ascending.
        seconds: of one forward over each.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(passes: Sequence[tuple[int, int, float]]) -> Curve:
        """The means of measured (width, forwards, seconds).

        Raises:
            UsageError: nothing was measured.
        """
        counts: dict[int, int] = {}
        totals: dict[int, float] = {}
        for width, count, seconds in passes:
            counts[width] = counts.get(width, 0) + count
            totals[width] = totals.get(width, 0.0) + seconds
        if not counts:
            raise UsageError("no forward of this model was measured")
        widths = sorted(counts)
        return Curve(tuple(widths), tuple(totals[width] / counts[width] for width in widths))

    def __call__(self, width: int) -> float:
        """Seconds of one forward over `width` tokens."""
        if len(self.widths) == 1 or width <= self.widths[0]:
            return self.seconds[0] * max(1.0, width / self.widths[0])
        right = min(max(bisect_left(self.widths, width), 1), len(self.widths) - 1)
        (x0, x1), (y0, y1) = self.widths[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (width - x0) / (x1 - x0), min(y0, y1))


@dataclass(frozen=True, slots=True)
class Stage:
    """One level.

    Attributes:
        cost: of its model; None for a drafter without one.
        window: tokens asked of the level below per round; 0 at the bottom.
        acceptance: entry i is the probability of keeping the draft's token i, given that those before it were kept;
            the last entry stands for all further ones. Empty at the bottom.
        supply: the probability that the level below has anything to propose; prompt lookup often has nothing.
    """

    cost: Cost | None
    window: int = 0
    acceptance: tuple[float, ...] = ()
    supply: float = 1.0

    def seconds(self, width: int) -> float:
        """Of one forward over so many tokens."""
        return self.cost(width) if self.cost else 0.0

    def kept(self, position: int) -> float:
        """The probability of keeping the token at this position of the draft."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]


def expected_seconds(stages: Sequence[Stage], tokens: int, prompt: int = 1) -> float:
    """Seconds in which the last of `stages`, lowest first, is expected to emit this many tokens after a prompt.

    Past `_LONG` tokens the cost per token has settled, and is taken as constant.
    """
    emit = _emission(tuple(stages))

    def seconds(n: int) -> float:
        return sum(part for _, part in emit(len(stages) - 1, n, (prompt - 1,) * len(stages)).values())

    if tokens <= _LONG:
        return seconds(tokens)
    settled = _LONG * 3 // 4
    return seconds(_LONG) + (tokens - _LONG) * (seconds(_LONG) - seconds(settled)) / (_LONG - settled)


_LONG = 96


def long_run_rate(stages: Sequence[Stage]) -> float:
    """Tokens per second of an answer without end: whole rounds of the highest level, until they repeat."""
    top, emit = stages[-1], _emission(tuple(stages))
    if not top.window:
        return 1 / top.seconds(1)
    chances: dict[Lags, float] = {(0,) * (len(stages) - 1): 1.0}
    tokens = seconds = 0.0
    for _ in range(_ROUNDS):
        tokens = seconds = 0.0
        after: dict[Lags, float] = {}
        for lags, chance in chances.items():
            for asked, supplied in ((top.window, top.supply), (0, 1 - top.supply)):
                for below, (p, s) in emit(len(stages) - 2, asked, lags).items() if supplied else ():
                    weight = chance * supplied
                    seconds += weight * (s + p * top.seconds(asked + 1))
                    for kept, p_kept in _outcomes(top, asked):
                        behind = _behind(stages, below, asked, kept)
                        after[behind] = after.get(behind, 0.0) + weight * p * p_kept
                        tokens += weight * p * p_kept * (kept + 1)
        chances = after
    return tokens / seconds


_ROUNDS = 12

Lags = tuple[int, ...]
"""For each level, lowest first, how many tokens more than one its model has not been fed yet."""

Ends = dict[Lags, tuple[float, float]]
"""Where an emission can end: the lags, their probability, and the expected seconds on the way times it."""


@lru_cache(maxsize=32)
def _emission(stages: tuple[Stage, ...]) -> Callable[[int, int, Lags], Ends]:
    """The function (level, n, lags) -> how the emission of exactly n tokens ends."""

    @cache
    def emit(level: int, n: int, lags: Lags) -> Ends:
        if n == 0:
            return {lags: (1.0, 0.0)}
        if level == 0:
            return {(0,): (1.0, stages[0].seconds(1 + lags[0]) + (n - 1) * stages[0].seconds(1))}
        ends: Ends = {}
        for asked, chance in _drafts(stages[level], n):
            own = stages[level].seconds(asked + 1 + lags[level])
            for below, (p_below, s_below) in emit(level - 1, asked, lags[:level]).items():
                for kept, p_kept in _outcomes(stages[level], asked):
                    behind = (*_behind(stages, below, asked, kept), 0)
                    weight = chance * p_kept
                    for end, (p, s) in emit(level, n - kept - 1, behind).items():
                        probability = weight * p_below * p
                        seconds = weight * (s_below * p + p_below * p * own + p_below * s)
                        before = ends.get(end, (0.0, 0.0))
                        ends[end] = (before[0] + probability, before[1] + seconds)
        return ends

    return emit


def _behind(stages: Sequence[Stage], lags: Lags, drafted: int, kept: int) -> Lags:
    """The lags of the lower levels once `kept` of their `drafted` tokens stand, with one token more after them. Without
    a model there is nothing to catch up."""
    return tuple(
        max(0, kept - drafted + 1 + lag) if stage.cost else 0 for stage, lag in zip(stages, lags, strict=False)
    )


def _drafts(stage: Stage, n: int) -> list[tuple[int, float]]:
    """How many tokens the level below delivers, and how likely."""
    asked = min(stage.window, n - 1)
    found = [(asked, stage.supply), (0, 1 - stage.supply)] if asked else [(0, 1.0)]
    return [(d, chance) for d, chance in found if chance > 0]


def _outcomes(stage: Stage, drafted: int) -> list[tuple[int, float]]:
    """How many of the drafted tokens are kept, and how likely."""
    outcomes, reach = [], 1.0
    for position in range(drafted):
        outcomes.append((position, reach * (1 - stage.kept(position))))
        reach *= stage.kept(position)
    return [(kept, p) for kept, p in [*outcomes, (drafted, reach)] if p > 0]


def expected_tokens(stage: Stage) -> float:
    """Tokens per forward of a level, its replacement or bonus included."""
    return sum((kept + 1) * p for kept, p in _outcomes(stage, stage.window)) * stage.supply + 1 - stage.supply
