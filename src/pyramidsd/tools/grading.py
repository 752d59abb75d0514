"""Grading an answer, programs included."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyramidsd.tools.sandbox import run_program
from pyramidsd.tools.tasks import TASKS, Question, checks_of
from pyramidsd.types import UsageError


def check_code(questions: Sequence[Question], allowed: bool) -> None:
    """Programs that a model wrote are run only where the user said so.

    Raises:
        UsageError: there are some to run, and it is not allowed, or not possible here.
    """
    if not any(q.task == "humaneval" for q in questions):
        return
    if not allowed:
        raise UsageError(
            "these prompts are graded by running programs that the models write; if you accept that, add "
            "--run-generated-code"
        )
    if os.name != "posix":
        raise UsageError("programs can be run on Linux and macOS only; choose another prompt file")


def graded(asked: Question, text: str) -> dict[str, Any]:
    """What a record says about a text as an answer: `correct` and `parsed`, both None where there is nothing to compare
    with; `verdict` where it is a program that was run."""
    if asked.task is None:
        return {"correct": None, "parsed": None}
    item = asked.prompt.item
    found = TASKS[asked.task].found(text, item)
    if found is None:
        return {"correct": False, "parsed": False}
    if asked.task != "humaneval":
        return {"correct": found == asked.expected, "parsed": True}
    verdict = run_program([*found, *checks_of(item)])
    return {"correct": verdict.status == "passed", "parsed": True, "verdict": verdict.status, "detail": verdict.detail}
