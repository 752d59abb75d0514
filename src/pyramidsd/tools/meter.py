"""Measuring from outside: where the time goes, model by model and width by width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Passes:
    """The forwards of one model.

    Attributes:
        widths: for each number of tokens that were fed at once, how often, and seconds in all.
    """

    widths: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, width: int, seconds: float) -> None:
        """One more forward."""
        count, total = self.widths.get(width, (0, 0.0))
        self.widths[width] = (count + 1, total + seconds)

    @property
    def count(self) -> int:
        """Forwards."""
        return sum(count for count, _ in self.widths.values())

    @property
    def seconds(self) -> float:
        """Seconds inside them."""
        return sum(seconds for _, seconds in self.widths.values())


@dataclass
class Clock:
    """Seconds of a block, and of the forwards of each model in it.

    Attributes:
        passes: one entry per model, in the order given; empty for a drafter without a model.
        seconds: of the whole block.
    """

    passes: list[Passes]
    seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the time outside model forwards, in [0, 1]."""
        return 1 - sum(model.seconds for model in self.passes) / self.seconds if self.seconds else 0.0


def now() -> float:
    """Seconds, once everything asked of the accelerator is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def measured(models: Sequence[Any]) -> Iterator[Clock]:
    """A clock over the block, with a stopwatch around every forward of the torch modules behind `models`."""
    clock = Clock([Passes() for _ in models])
    started = [0.0] * len(models)

    def before(i: int) -> None:
        started[i] = now()

    def after(i: int, inputs: dict[str, Any]) -> None:
        clock.passes[i].add(inputs["input_ids"].shape[-1], now() - started[i])

    with ExitStack() as hooks:
        for i, module in enumerate(getattr(model, "model", None) for model in models):
            if isinstance(module, torch.nn.Module):
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, i=i: before(i)))
                hooks.enter_context(
                    module.register_forward_hook(
                        lambda _m, _args, inputs, _out, i=i: after(i, inputs), with_kwargs=True
                    )
                )
        begun = now()
        try:
            yield clock
        finally:
            clock.seconds = now() - begun
