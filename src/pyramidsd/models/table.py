"""`TableModel`: a model of known law, for tests, documentation and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyramidsd.models.base import CachedModel


class TableModel(CachedModel):
    """A model given by its law.

    Args:
        vocab_size: V, the number of tokens.
        law: context -> V probabilities of the next token. It must be a pure function.
    """

    def __init__(self, vocab_size: int, law: Callable[[list[int]], Sequence[float]]) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._law = law
        self._cache: list[int] = []

    def _forward(self, tokens: list[int], n: int) -> Tensor:
        self._cache += tokens
        ends = range(len(self._cache) - n + 1, len(self._cache) + 1)
        rows = [torch.as_tensor(self._law(self._cache[:end]), dtype=torch.float64) for end in ends]
        return torch.stack(rows).log()

    def _rollback(self, n: int) -> None:
        del self._cache[-n:]

    def _reset(self) -> None:
        self._cache.clear()
