"""`Model`: rows for the last n prefixes of a context; `CachedModel` keeps its cache in step by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyramidsd.types import UsageError


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two lists share. Whole slices are compared, so 32 k tokens take well under 1 ms."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first `low` tokens agree, the first `high` do not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Model(ABC):
    """A language model on one sequence.

    Attributes:
        vocab_size: the width of its rows.
        max_context: the longest context it was made for, in tokens; None where there is no bound.
        stop_tokens: the ids after which it has nothing more to say.
    """

    vocab_size: int
    max_context: int | None = None
    stop_tokens: frozenset[int] = frozenset()

    @abstractmethod
    def logits(self, context: list[int], n: int) -> Tensor:
        """Raw rows [n, vocab_size] for the last n prefixes of `context`, in float32 or wider."""

    def vocabulary(self) -> Mapping[int, str] | None:
        """The token of every id, where the model knows its tokenizer."""
        return None


class CachedModel(Model):
    """A model whose cache holds one context at a time. A backend writes `_forward`, `_rollback` and `_reset` only."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    def logits(self, context: list[int], n: int) -> Tensor:
        """One forward, whatever must be caught up included: the longest common prefix with the last context is kept.

        Raises:
            UsageError: n is not between 1 and len(context), or the context is past `max_context`.
        """
        if not 1 <= n <= len(context):
            raise UsageError(f"asked for {n} rows of {len(context)} tokens; the context must hold at least one token")
        if self.max_context is not None and len(context) > self.max_context:
            raise UsageError(
                f"{len(context)} tokens of context are more than the model's {self.max_context}; shorten the prompt"
            )
        keep = common_prefix(self._seen, context[: len(context) - n])
        try:
            if keep < len(self._seen):
                self._rollback(len(self._seen) - keep)
            rows = self._forward(context[keep:], n)
            self._seen = context[:]
        except BaseException:  # an interrupt may leave some layers ahead of others
            self.forget()
            raise
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def forget(self) -> None:
        """Drop the cache, so that the next context is read from its beginning."""
        self._seen = []
        self._reset()

    @abstractmethod
    def _forward(self, tokens: list[int], n: int) -> Tensor:
        """Append `tokens` (at least n) to the cache; rows [n, vocab_size] for the last n of them."""

    @abstractmethod
    def _rollback(self, n: int) -> None:
        """Drop the last n > 0 tokens from the cache."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop the whole cache, whatever state it is in."""


class FittedModel(Model):
    """A model whose padded vocabulary differs in size from the target's (Qwen2.5 has 151936 and 152064 rows for
    one tokenizer). Its rows beyond the target's are cut off; tokens it has no row for are impossible to it, and read
    as its last one."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        self.max_context = model.max_context
        self.stop_tokens = model.stop_tokens

    def logits(self, context: list[int], n: int) -> Tensor:
        """As `Model.logits`."""
        last = self._model.vocab_size - 1
        if max(context) > last:
            context = [min(token, last) for token in context]
        return pad(self._model.logits(context, n), (0, self.vocab_size - self._model.vocab_size), value=-torch.inf)
