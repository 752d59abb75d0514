"""Measuring from outside: where the time goes, model by model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Clock:
    """Seconds of a block, and of the forwards of each model in it.

    Attributes:
        seconds: of the whole block.
        forward_seconds, forwards: one entry per model, in the order given; 0 for a drafter without a model.
    """

    forward_seconds: list[float]
    forwards: list[int]
    seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the time outside model forwards, in [0, 1]."""
        return 1 - sum(self.forward_seconds) / self.seconds if self.seconds else 0.0


def now() -> float:
    """Seconds, once everything asked of the accelerator is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def measured(models: Sequence[Any]) -> Iterator[Clock]:
    """A clock over the block, with a stopwatch around every forward of the torch modules behind `models`."""
    clock = Clock([0.0] * len(models), [0] * len(models))
    started = [0.0] * len(models)

    def before(i: int) -> None:
        started[i] = now()

    def after(i: int) -> None:
        clock.forward_seconds[i] += now() - started[i]
        clock.forwards[i] += 1

    with ExitStack() as hooks:
        for i, module in enumerate(getattr(model, "model", None) for model in models):
            if isinstance(module, torch.nn.Module):
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, i=i: before(i)))
                hooks.enter_context(module.register_forward_hook(lambda *_, i=i: after(i)))
        begun = now()
        try:
            yield clock
        finally:
            clock.seconds = now() - begun
