"""Measuring from outside: the share of the time that is spent in model forwards."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Clock:
    """Seconds since it was started, and the seconds of them inside forwards."""

    started: float = 0.0
    seconds: float = 0.0
    forward_seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the time outside model forwards, in [0, 1]."""
        return 1 - self.forward_seconds / self.seconds if self.seconds else 0.0


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def measured(models: Iterable[Any]) -> Iterator[Clock]:
    """A clock over the block, with a stopwatch around every forward of the torch modules behind `models`."""
    clock = Clock()

    def before(*_: object) -> None:
        clock.started = _now()

    def after(*_: object) -> None:
        clock.forward_seconds += _now() - clock.started

    with ExitStack() as hooks:
        for module in (getattr(model, "model", None) for model in models):
            if isinstance(module, torch.nn.Module):
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after))
        begun = _now()
        try:
            yield clock
        finally:
            clock.seconds = _now() - begun
