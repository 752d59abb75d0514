"""Consoles and progress, shared by the verbs. Text goes to stdout, everything about it to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)


@contextmanager
def busy(what: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere; it pulses while the total is unknown. Yields the function that
    moves it on."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not (shown and err.is_terminal)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda steps: progress.advance(task, steps)
