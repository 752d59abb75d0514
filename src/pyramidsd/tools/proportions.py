"""Shares of right answers: intervals for one, and for the difference of two on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson(right: int, answers: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a binomial share. Wilson, JASA 22 (1927) 209-212; recommended for few answers and
    shares near 0 or 1 by Brown, Cai and DasGupta, Statistical Science 16 (2001) 101-133.

    Raises:
        ValueError: no answers.
    """
    if answers < 1:
        raise ValueError("a share of no answers has no interval")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = right / answers
    centre = share + z * z / (2 * answers)
    half = z * math.sqrt(share * (1 - share) / answers + z * z / (4 * answers * answers))
    low, high = ((centre + sign * half) / (1 + z * z / answers) for sign in (-1, 1))
    return 0.0 if right == 0 else low, 1.0 if right == answers else high  # not off by rounding


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two answerers, one and other, on the same questions.

    Attributes:
        both, only_one, only_other, neither: questions answered rightly by these.
    """

    both: int
    only_one: int
    only_other: int
    neither: int

    @staticmethod
    def of(answers: Sequence[tuple[bool, bool]]) -> Pairs:
        """The counts of some answers: whether one and whether the other was right."""
        return Pairs(*(answers.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def difference(self) -> float:
        """The share of one less the share of the other."""
        return (self.only_one - self.only_other) / self._count

    @property
    def _count(self) -> int:
        return self.both + self.only_one + self.only_other + self.neither

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Newcombe's interval of the difference: the two Wilson intervals, squared and added with the correlation of
        the answers. Method 10 of Newcombe, Statistics in Medicine 17 (1998) 2635-2650."""
        one, other = self.both + self.only_one, self.both + self.only_other
        (low1, high1), (low2, high2) = (wilson(right, self._count, confidence) for right in (one, other))
        p1, p2, phi = one / self._count, other / self._count, self._correlation(one, other)
        below = math.hypot(p1 - low1, high2 - p2) ** 2 - 2 * phi * (p1 - low1) * (high2 - p2)
        above = math.hypot(high1 - p1, p2 - low2) ** 2 - 2 * phi * (high1 - p1) * (p2 - low2)
        return self.difference - math.sqrt(max(below, 0)), self.difference + math.sqrt(max(above, 0))

    def _correlation(self, one: int, other: int) -> float:
        """The phi coefficient, with Newcombe's continuity correction where it is positive."""
        margins = one * (self._count - one) * other * (self._count - other)
        excess = self.both * self.neither - self.only_one * self.only_other
        corrected = max(excess - self._count / 2, 0) if excess > 0 else excess
        return corrected / math.sqrt(margins) if margins else 0.0

    @property
    def p_value(self) -> float:
        """Of McNemar's exact test that both are equally often right, two-sided: a fair coin on the discordant pairs."""
        discordant = self.only_one + self.only_other
        fewer = min(self.only_one, self.only_other)
        tail = sum(math.comb(discordant, k) for k in range(fewer + 1))
        return min(1.0, float(2 * tail / 2**discordant))
