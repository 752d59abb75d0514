"""Drafters without a model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from pyramidsd.types import Draft, Laws, Randomness, Stats, UsageError


class NoDraft:
    """Proposes nothing: a level over it is plain decoding."""

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:  # noqa: ARG002  the protocol's signature
        """An empty draft."""
        return Draft()


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Proposes what followed the last occurrence of the context's final n-gram, in the prompt or in the output.

    The longest n-gram that occurs decides. A continuation that reaches the end of the context goes on with its
    own tokens, so a loop is drafted whole. Its laws are one-hot.

    Attributes:
        max_ngram: longest n-gram looked for, in tokens.
        min_ngram: shortest one.

    Saxena, "Prompt lookup decoding", 2023.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(f"n-grams need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:  # noqa: ARG002  it draws nothing
        """At most n tokens; none where no n-gram occurs twice."""
        start = self._continuation(context)
        if n < 1 or start is None:
            return Draft(stats=(Stats(),))
        tokens = list(context[start : start + n])
        while len(tokens) < n:  # the period of the loop is len(context) - start
            tokens.append(tokens[len(tokens) - (len(context) - start)])
        return Draft(tokens, Laws.one_hot(tokens), [0] * n, torch.zeros(n), (Stats(),))

    def _continuation(self, context: list[int]) -> int | None:
        """Where the continuation of the last earlier occurrence of the final n-gram starts."""
        data = array("q", context)
        size, text = data.itemsize, data.tobytes()
        for ngram in range(min(self.max_ngram, len(context) - 1), self.min_ngram - 1, -1):
            needle = text[-ngram * size :]
            at = text.rfind(needle, 0, len(text) - size)
            while at > 0 and at % size:  # a match across token boundaries is none
                at = text.rfind(needle, 0, at + len(needle) - 1)
            if at >= 0:
                return at // size + ngram
        return None
