"""Traces: what every model of a pyramid says along the target's own answer, and replaying a pyramid on them.

A replay runs the engine itself, rules, windows and counters included, on recorded rows instead of forwards, and adds up
what the forwards would have cost. For exact greedy methods it gives the very rounds of a live run up to the unused tail
of a draft that has left the target's answer; for the others it assumes that rows change little where a fuzzily accepted
token differs from the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pyramidsd.config import METHODS, PROMPT_LOOKUP, PyramidConfig, stack
from pyramidsd.drafters import PromptLookup
from pyramidsd.models.base import CachedModel, Model
from pyramidsd.sampling import Rng
from pyramidsd.tools.expectation import Cost, Curve
from pyramidsd.tools.meter import now
from pyramidsd.types import Drafter, Stats

KEPT_TOKENS = 32
"""At each position the most probable tokens of every model are kept by themselves."""

REST_BINS = 256
"""What is left of a row is spread evenly over so many more, so that no part of it outweighs a real token."""

CALIBRATION_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer of the target.

    Attributes:
        context: the prompt, over the trace's own small vocabulary.
        length: of the answer, in tokens.
        rows: for each model the log-probabilities [length, V] before each token of the answer.
        entropy: for each model its entropy in nats before each token of the answer.
        stop_tokens: over the small vocabulary.
    """

    context: list[int]
    length: int
    rows: Mapping[str, Tensor]
    entropy: Mapping[str, list[float]]
    stop_tokens: frozenset[int]


@torch.inference_mode()
def trace(models: Mapping[str, Model], target: Model, context: Sequence[int], answer: Sequence[int]) -> Trace:
    """Ask every model once about all positions of an answer.

    Args:
        models: the pyramid's models by name, the target among them.
        context: the prompt's tokens.
        answer: the tokens that followed, at least one.
    """
    asked = [*context, *answer[:-1]]
    full = {name: _over(model.logits(asked, len(answer)), target.vocab_size) for name, model in models.items()}
    logs = {name: rows.log_softmax(-1).cpu() for name, rows in full.items()}
    tops = [rows.topk(min(KEPT_TOKENS, rows.shape[-1])).indices.flatten() for rows in logs.values()]
    kept = sorted({*context, *answer, *(token for top in tops for token in top.tolist())})
    index = {token: i for i, token in enumerate(kept)}
    entropy = {name: (-(rows.exp() * rows).nan_to_num(0.0).sum(-1)).tolist() for name, rows in logs.items()}
    return Trace(
        [index[token] for token in context],
        len(answer),
        {name: _reduced(rows, kept) for name, rows in logs.items()},
        entropy,
        frozenset(index[token] for token in target.stop_tokens if token in index),
    )


def _over(rows: Tensor, vocab_size: int) -> Tensor:
    """Rows over the target's vocabulary: padding is cut off, missing tokens are impossible."""
    return torch.nn.functional.pad(rows, (0, vocab_size - rows.shape[-1]), value=-torch.inf)


def _reduced(rows: Tensor, kept: list[int]) -> Tensor:
    head = rows[:, kept]
    rest = (1 - head.exp().sum(-1, keepdim=True)).clamp_min(1e-12).log() - torch.tensor(float(REST_BINS)).log()
    return torch.cat([head, rest.expand(-1, REST_BINS)], -1)


class ReplayModel(CachedModel):
    """Recorded rows as a model: it looks at how long a prefix is, not at what is in it.

    Attributes:
        seconds: what its forwards would have cost until now.
    """

    def __init__(self, rows: Tensor, start: int, cost: Cost, stop_tokens: frozenset[int]) -> None:
        super().__init__()
        self.vocab_size = rows.shape[-1]
        self.stop_tokens = stop_tokens
        self.seconds = 0.0
        self._rows, self._start, self._cost = rows, start, cost
        self._reset()

    def _forward(self, tokens: list[int], n: int) -> Tensor:
        self._length += len(tokens)
        self.seconds += self._cost(len(tokens))
        first = self._length - n + 1 - self._start
        return self._rows[first : first + n]

    def _rollback(self, n: int) -> None:
        self._length -= n

    def _reset(self) -> None:
        self._length = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """What a pyramid would have done.

    Attributes:
        tokens: emitted.
        seconds: in forwards, the reading of the prompt included.
        deviation: summed over the tokens.
        stats: one entry per level, lowest first.
    """

    tokens: int
    seconds: float
    deviation: float
    stats: tuple[Stats, ...]


def replay(config: PyramidConfig, recorded: Trace, costs: Mapping[str, Cost], seed: int = 0) -> Replay:
    """Run the pyramid of `config` on a trace of its models.

    Args:
        costs: seconds of a forward of each model.
    """
    start = len(recorded.context)
    models: list[Model | Drafter] = [
        PromptLookup()
        if name == PROMPT_LOOKUP
        else ReplayModel(recorded.rows[name], start, costs[name], recorded.stop_tokens)
        for name in config.models
    ]
    draft = stack(config, models).draft(recorded.context, recorded.length, Rng(seed))
    used = METHODS[config.method].pick(models)
    seconds = sum(model.seconds for model in used if isinstance(model, ReplayModel))
    return Replay(len(draft), seconds, float(draft.deviation.sum()), draft.stats)


def calibrate(model: Any, context: Sequence[int], repeats: int = 3) -> Curve:
    """Time forwards of a model over `CALIBRATION_WIDTHS` tokens and over the whole of `context`.

    Args:
        context: tokens, more than the widest of them.
    """
    passes = []
    for width in [*(w for w in CALIBRATION_WIDTHS if w < len(context)), len(context)]:
        before, rows = list(context[:-width]), width if width < len(context) else 1
        taken = []
        for _ in range(repeats + 1):  # the first one warms up
            model.logits(before, 1) if before else model.forget()
            begun = now()
            model.logits(list(context), rows)
            taken.append(now() - begun)
        passes.append((width, 1, median(taken[1:])))
    return Curve.of(passes)
