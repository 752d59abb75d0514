"""Prompts from files: Spec-Bench, HumanEval, GSM8K, multiple choice, chats and plain text."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pyramidsd.generate import Message
from pyramidsd.types import UsageError

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    Attributes:
        id: unique in its file.
        task: which of `KINDS` it is.
        messages: how the chat begins; a tokenizer without a chat template gets their contents as one text.
        followups: what the user says after each answer.
        item: the line it came from, with the answer where there is one.
    """

    id: str
    task: str
    messages: tuple[Message, ...]
    followups: tuple[str, ...] = ()
    item: Item = field(default_factory=dict)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _humaneval(item: Item) -> tuple[Message, ...]:
    return _user(
        "Complete the following Python function. Answer with the whole function, its imports included, in one "
        f"code block.\n\n```python\n{item['prompt']}```"
    )


def _gsm8k(item: Item) -> tuple[Message, ...]:
    question = item.get("question", item.get("prompt"))
    return _user(f"{question}\n\nThink step by step. End with a line that says: The answer is NUMBER")


def letters(item: Item) -> list[str]:
    """The letters of the choices of a multiple-choice item."""
    return [chr(ord("A") + i) for i in range(len(item["choices"]))]


def _choice(item: Item) -> tuple[Message, ...]:
    question = item.get("question", item.get("prompt"))
    choices = "\n".join(f"{letter}. {text}" for letter, text in zip(letters(item), item["choices"], strict=True))
    return _user(f"{question}\n\n{choices}\n\nEnd with a line that says: The answer is LETTER")


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of a line.

    Attributes:
        keys: a line that has all of them is of this kind; the first kind that fits decides.
        messages: the chat that the line becomes.
        expected: the keys one of which holds the right answer; empty where there is none to compare with.
    """

    keys: tuple[str, ...]
    messages: Callable[[Item], Sequence[Message]]
    expected: tuple[str, ...] = ()


KINDS = {
    "humaneval": Kind(("prompt", "entry_point", "test"), _humaneval, ("test",)),
    "chat": Kind(("messages",), lambda item: item["messages"], ("expected", "answer")),
    "spec-bench": Kind(("turns",), lambda item: _user(item["turns"][0])),
    "choice": Kind(("choices", "answer"), _choice, ("answer", "expected")),
    "gsm8k": Kind(("question", "answer"), _gsm8k, ("answer", "expected")),
    "math": Kind(("prompt", "upstream_answer", "expected"), _gsm8k, ("expected", "answer")),
    "text": Kind(("prompt",), lambda item: _user(item["prompt"]), ("expected", "answer")),
}


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, evenly spread over it where there are more than `limit`.

    A `.jsonl` file has one JSON object a line, in one of the formats of `KINDS`; any other file has one prompt a line.

    Raises:
        UsageError: the file cannot be read, holds nothing, or a line is in no known format; the message names it.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it first") from error
    read = _json_prompt if path.suffix == ".jsonl" else _text_prompt
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [read(f"{path}, line {number}", number, line) for number, line in numbered]
    if not prompts:
        raise UsageError(f"{path} holds no prompts; write one a line")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise UsageError(f"{path} uses an id twice; give every line its own")
    if limit is None or limit >= len(prompts):
        return prompts
    if limit < 1:
        raise UsageError(f"the number of prompts must be at least 1, got {limit}")
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _text_prompt(_where: str, number: int, line: str) -> Prompt:
    return Prompt(str(number), "text", _user(line))


def _json_prompt(where: str, number: int, line: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    fits = (name for name, kind in KINDS.items() if isinstance(item, dict) and all(key in item for key in kind.keys))
    name = next(fits, None)
    if name is None:
        raise UsageError(
            f'{where} is in no known format; give {{"prompt": TEXT}}, {{"messages": [...]}}, or a line of '
            "Spec-Bench (turns), HumanEval (prompt, entry_point, test), GSM8K (question, answer) or multiple choice "
            "(question, choices, answer)"
        )
    problem = _problem(name, item)
    if problem:
        raise UsageError(f"{where}: {problem}")
    ids = [str(item[key]) for key in ("id", "task_id", "question_id") if item.get(key) is not None]
    messages = tuple(KINDS[name].messages(item))
    return Prompt((ids or [str(number)])[0], name, messages, tuple(item.get("turns", ())[1:]), item)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _problem(name: str, item: Item) -> str | None:
    """What is wrong with the values of a line whose keys are right."""
    for key in ("prompt", "question", "entry_point", "test"):
        if key in item and key in KINDS[name].keys and not _is_text(item[key]):
            return f"{key} must be text, got {item[key]!r}"
    for key, what in (("turns", "texts"), ("choices", "texts")):
        value = item.get(key, [""])
        if key in KINDS[name].keys and not (isinstance(value, list) and value and all(map(_is_text, value))):
            return f"{key} must be a list of {what}, got {value!r}"
    if name == "choice" and not _is_text(item.get("question", item.get("prompt"))):
        return "a multiple-choice line needs a question"
    if name == "chat":
        chat = item["messages"]
        fits = isinstance(chat, list) and chat and all(isinstance(m, dict) for m in chat)
        if not (fits and all(isinstance(m.get("role"), str) and _is_text(m.get("content")) for m in chat)):
            return "messages must be a list of objects with a role and a content, both text"
    return None


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `prompts_from` reads."""
    parser.add_argument(
        "--prompts", type=Path, required=True, nargs="+", metavar="FILE", help="what is asked; formats: see the manual"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="so many prompts of each file, evenly spread; default all"
    )


def prompts_from(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of all files, in turn where there are several.

    Raises:
        UsageError: as `read_prompts`, or two files use one id.
    """
    columns = [read_prompts(path, args.limit) for path in args.prompts]
    prompts = [prompt for row in zip_longest(*columns) for prompt in row if prompt is not None]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"two prompt files use the id {prompt.id}; give their lines ids, or run the files apart")
        seen.add(prompt.id)
    return prompts


def prompt_facts(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a record says about them; the digest sees to it that a record is taken up with the same prompts only."""
    asked = json.dumps([[p.id, list(map(dict, p.messages)), list(p.followups)] for p in prompts], sort_keys=True)
    return {
        "files": [path.name for path in args.prompts],
        "count": len(prompts),
        "digest": hashlib.sha256(asked.encode()).hexdigest()[:16],
    }
