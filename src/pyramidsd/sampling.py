"""`Sampling` turns raw rows into the laws tokens are drawn from; `Rng` draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidsd.types import Laws, NumberError, UsageError

Processor = Callable[[Tensor, Tensor], Tensor]
"""(input_ids [1, t], scores [1, V]) -> scores [1, V]: the protocol of transformers' logits processors.
It must be a pure function of the prefix, because prefixes are asked about more than once."""


COLDEST = 1e-5
"""Below this, logits over temperature leave the range of float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a level draws: processors, then temperature, then top-k, top-p and min-p, as transformers does.

    Attributes:
        temperature: 0 is greedy (a one-hot law), 1 the model's own law.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens with at least min_p times the largest probability; 0 keeps all.
        processors: changes of the scores that depend on the prefix, such as penalties.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 (greedy) or at least {COLDEST}, got {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or a positive number, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must lie in [0, 1], got {self.min_p}")

    def laws(self, logits: Tensor, context: list[int]) -> Laws:
        """The laws of rows [n, V] that belong to the last n prefixes of `context`."""
        scores = self._processed(logits, context)
        if self.temperature == 0:
            best = scores.max(-1, keepdim=True)
            one = best.values * 0 + 1  # NaN where the row is, so that it is found where a token is drawn
            return Laws(logits, torch.zeros_like(scores).scatter_(-1, best.indices, one))
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            smallest_kept = scores.topk(self.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
        probs = scores.softmax(-1)
        if self.top_p < 1 or self.min_p > 0:
            floor = torch.maximum(_nucleus_floor(probs, self.top_p), self.min_p * probs.amax(-1, keepdim=True))
            probs = torch.where(probs < floor, 0.0, probs)
            probs = probs / probs.sum(-1, keepdim=True)
        return Laws(logits, probs)

    def _processed(self, logits: Tensor, context: list[int]) -> Tensor:
        if not self.processors:
            return logits
        ids = torch.tensor([context], device=logits.device)
        first = len(context) - len(logits) + 1
        rows = []
        for i, row in enumerate(torch.split(logits.clone(), 1)):
            for processor in self.processors:
                row = processor(ids[:, : first + i], row)
            rows.append(row)
        return torch.cat(rows)


def _nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """The smallest probability in the smallest set of tokens whose mass reaches top_p, [n, 1]."""
    if top_p == 1:
        return torch.zeros_like(probs[:, :1])
    size = probs.shape[-1]
    descending = probs.topk(min(_NUCLEUS, size)).values
    if bool((descending.sum(-1) < top_p).any()):  # a flat law; only then all tokens must be sorted
        descending = probs.topk(size).values
    needed = descending.cumsum(-1) - descending < top_p
    last = (needed.sum(-1, keepdim=True) - 1).clamp_min(0)  # a NaN row needs none
    return descending.gather(-1, last)


_NUCLEUS = 256


class Rng:
    """Seeded randomness on the CPU, so that a seed means the same on every device."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def coin(self, p: float) -> bool:
        """True with probability p."""
        return self._random.random() < p

    def choice(self, probs: Tensor) -> int:
        """An index drawn from the law `probs` [V] by inverting its distribution function."""
        cumulative = probs.cpu().double().cumsum(0)
        total = float(cumulative[-1])
        if not 0 < total < float("inf"):
            raise NumberError(
                "a model gave NaN or infinite logits; its weights may be damaged, or its dtype too narrow: try float32"
            )
        # The last entry is left out, so that rounding can never point past the end.
        point = self._random.random() * total
        return int(torch.searchsorted(cumulative[:-1], point, right=True))
