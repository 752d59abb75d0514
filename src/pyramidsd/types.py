"""The values that travel between levels: `Laws`, `Draft`, `Stats`, and the error shown to users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


class UsageError(ValueError):
    """Bad input. The message is one line that names the cure."""


class NumberError(ArithmeticError):
    """A model answered with NaN or infinite logits, so there is nothing to draw from."""


class Randomness(Protocol):
    """The one way randomness enters the engine; `Rng` draws, tests walk every branch."""

    def coin(self, p: float) -> bool:
        """True with probability p."""
        ...

    def choice(self, probs: Tensor) -> int:
        """An index drawn from the law `probs` [V]."""
        ...


@dataclass(frozen=True, slots=True)
class Laws:
    """Rows of one model for n consecutive prefixes.

    Attributes:
        logits: the raw rows [n, V]: temperature 1, no processors, known up to a constant per row.
            Log-probabilities where no model stands behind them; -inf where a token is impossible.
        probs: the laws [n, V] that tokens are really drawn from; every row sums to 1.
    """

    logits: Tensor
    probs: Tensor

    def __len__(self) -> int:
        return len(self.probs)

    def __getitem__(self, rows: slice) -> Laws:
        return Laws(self.logits[rows], self.probs[rows])

    def like(self, other: Laws) -> Laws:
        """The same rows on the device, in the precision and over the vocabulary of `other`, which is at least as
        wide: tokens this proposer does not know have probability 0."""
        missing = (0, other.probs.shape[-1] - self.probs.shape[-1])
        logits, probs = self.logits.to(other.logits), self.probs.to(other.probs)
        return (
            Laws(pad(logits, missing, value=-torch.inf), pad(probs, missing)) if any(missing) else Laws(logits, probs)
        )

    @staticmethod
    def empty() -> Laws:
        """No rows, over the smallest vocabulary."""
        return Laws(torch.zeros(0, 1), torch.zeros(0, 1))

    @staticmethod
    def one_hot(tokens: Sequence[int]) -> Laws:
        """The laws of a proposer that has no doubts: all mass on each of `tokens`."""
        rows = torch.zeros(len(tokens), max(tokens) + 1)
        ids = torch.tensor(tokens).unsqueeze(-1)
        return Laws(torch.full_like(rows, -torch.inf).scatter_(-1, ids, 0.0), rows.scatter_(-1, ids, 1.0))

    @staticmethod
    def join(parts: Sequence[Laws]) -> Laws:
        """All rows of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        return Laws(torch.cat([p.logits for p in parts]), torch.cat([p.probs for p in parts]))


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one level. They add up with `+`.

    Attributes:
        proposed_at: entry i counts the rounds whose draft had a token at position i that was verified (those after an
            accepted stop token are not).
        accepted_at: entry i counts the rounds that kept it; as long as `proposed_at`.
        replaced: tokens drawn from the residual at a rejection.
        bonus: tokens added after a draft that was kept whole; plain decoding has only these.
        forwards: passes of the model, one per round.
    """

    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    replaced: int = 0
    bonus: int = 0
    forwards: int = 0

    @staticmethod
    def of_round(proposed: int, accepted: int, replaced: int, bonus: int) -> Stats:
        """The counters of one pass that verified `proposed` tokens and kept the first `accepted`."""
        return Stats((1,) * proposed, (1,) * accepted + (0,) * (proposed - accepted), replaced, bonus, 1)

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            _sums(self.proposed_at, other.proposed_at),
            _sums(self.accepted_at, other.accepted_at),
            self.replaced + other.replaced,
            self.bonus + other.bonus,
            self.forwards + other.forwards,
        )

    @property
    def proposed(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(self.accepted_at)

    @property
    def emitted(self) -> int:
        """Tokens this level handed on."""
        return self.accepted + self.replaced + self.bonus

    @property
    def acceptance(self) -> float:
        """Accepted over proposed tokens; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per forward, replacement and bonus included: 1 for plain decoding."""
        return self.emitted / self.forwards if self.forwards else 0.0


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def add_stats(a: Sequence[Stats], b: Sequence[Stats]) -> tuple[Stats, ...]:
    """Level by level sum; a missing entry counts as zero."""
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=Stats()))


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens of one proposer, with the laws they were really drawn from.

    Attributes:
        tokens: n token ids.
        laws: n rows; row i is the law of token i given everything before it.
        origin: for each token the index of the level that first proposed it, lowest level 0.
        deviation: [n] total variation between each token's law and the law of the model that vouched
            for it, in [0, 1]: 0 where the level is exact.
        stats: one entry per level that worked on it, lowest first.
    """

    tokens: list[int] = field(default_factory=list)
    laws: Laws = field(default_factory=Laws.empty)
    origin: list[int] = field(default_factory=list)
    deviation: Tensor = field(default_factory=lambda: torch.zeros(0))
    stats: tuple[Stats, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def join(parts: Sequence[Draft]) -> Draft:
        """One draft after the other; counters add up."""
        stats: tuple[Stats, ...] = ()
        for part in parts:
            stats = add_stats(stats, part.stats)
        return Draft(
            [token for part in parts for token in part.tokens],
            Laws.join([part.laws for part in parts]),
            [level for part in parts for level in part.origin],
            torch.cat([part.deviation for part in parts]),
            stats,
        )


class Drafter(Protocol):
    """Anything that proposes tokens. A `Level` is one."""

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:
        """At most n tokens that continue `context`. It may stop early because of what it has emitted,
        but never takes a token back for what it is: that would change the law."""
        ...
