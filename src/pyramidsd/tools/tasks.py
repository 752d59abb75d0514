"""Graders: where the answer stands in a text, and what the right one is. Pure; programs are run by `sandbox`."""

from __future__ import annotations

import ast
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pyramidsd.tools.prompts import KINDS, Item, Prompt, letters
from pyramidsd.types import UsageError


@dataclass(frozen=True, slots=True)
class Task:
    """How answers of one kind are graded: by `found(text, item) == expected(value, item)`.

    Attributes:
        found: the answer that a text gives, None where there is none to be found.
        expected: the right one, from the value of the line that holds it, None where that value cannot be one.
        wanted: what such a value is, in words.
        keys: what a line needs besides.
    """

    found: Callable[[str, Item], Any]
    expected: Callable[[Any, Item], Any]
    wanted: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the way it is graded.

    Attributes:
        task: a name from `TASKS`; None where the line holds no answer.
        expected: the right answer in the task's own form.
    """

    prompt: Prompt
    task: str | None = None
    expected: Any = None


def question(prompt: Prompt, task: str | None = None) -> Question:
    """How the answers to a prompt are graded: as `task` says, or by the format of its line.

    Raises:
        UsageError: a task is asked for and the line lacks what it needs, or the line's answer is none.
    """
    name = task or prompt.task
    where = f"prompt {prompt.id!r}"
    keys = KINDS[name].expected
    values = [prompt.item[key] for key in keys if prompt.item.get(key) is not None]
    if name not in TASKS or (not values and task is None):
        return Question(prompt)
    graded = TASKS[name]
    missing = [key for key in graded.keys if key not in prompt.item] + ([] if values else [" or ".join(keys)])
    if missing:
        raise UsageError(f"{where} cannot be graded as {name}: it has no {', no '.join(missing)}; add that to its line")
    expected = graded.expected(values[0], prompt.item)
    if expected is None:
        raise UsageError(
            f"{where} cannot be graded as {name}: its answer must be {graded.wanted}, got {values[0]!r}; correct the "
            f"line, or choose another --task of {', '.join(TASKS)}"
        )
    return Question(prompt, name, expected)


# Numbers: GSM8K and its like.

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_SIGNED = rf"(?:(?<![\w).])[-+\u2212])?(?:\$[-\u2212]?)?(?<![A-Za-z_0-9.])(?:{_NUMBER})"
_QUOTIENT = rf"({_SIGNED})(?:\s?/\s?({_NUMBER}))?"
_SUM = re.compile(rf"(?:{_SIGNED})(?:\s*[-+*/x\u00d7\u00f7\u2212]\s*\$?(?:{_NUMBER}))+\s*=\s*{_QUOTIENT}")
_FINAL = re.compile(r"answer\s+is|####|\\boxed\s*\{", re.IGNORECASE)


def numbers(text: str) -> list[Fraction]:
    """All numbers of a text, exactly. Thousands may be parted by commas; `3/4` is one number."""
    return [_value(*match.groups()) for match in re.finditer(_QUOTIENT, _plain_digits(text))]


def final_number(text: str) -> Fraction | None:
    r"""The number that a text ends in: the first one after the last "answer is", "####" or "\boxed{" that has one, or
    what it comes to where that begins a sum such as "3 + 4 = 7"; without any of these the last number."""
    text = _plain_digits(text)
    for rest in _after(_FINAL, text):
        first = re.search(_QUOTIENT, rest)
        if first:
            total = _SUM.match(rest, first.start())
            return _value(*(total or first).groups())
    every = numbers(text)
    return every[-1] if every else None


def _after(mark: re.Pattern[str], text: str) -> Iterator[str]:
    """What follows each mark up to the next one, the last first."""
    marks = [*mark.finditer(text)]
    ends = [*(match.start() for match in marks), len(text)][1:]
    return (text[match.end() : end] for match, end in reversed([*zip(marks, ends, strict=True)]))


def _plain_digits(text: str) -> str:
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")


def _value(numerator: str, denominator: str | None) -> Fraction:
    # Through Decimal, because int() refuses thousands of digits, and a model may well repeat one for ever.
    sign = -1 if re.search("[-\u2212]", numerator) else 1
    top, bottom = (Fraction(Decimal(re.sub(r"[^0-9.]", "", part or "1"))) for part in (numerator, denominator))
    return sign * (top / bottom if bottom else top)


def _expected_number(value: Any, _item: Item) -> Fraction | None:
    text = _plain_digits("" if isinstance(value, bool) else str(value)).rpartition("####")[2].strip()
    whole = re.fullmatch(rf"{_QUOTIENT}\s*[.%]?", text)
    return _value(*whole.groups()) if whole else None


# Multiple choice.

_CHOSEN = re.compile(r"(?:answer|option|choice)\b[\s*_]*(?:is\b|:|=)|\\boxed\s*\{", re.IGNORECASE)
_WRAPPING = r"""[\s*_"'`:(\[{$]|\\\(|\\(?:text|textbf|mathrm|boxed)\b"""
_LEAD = re.compile(rf"(?:{_WRAPPING})*(?:(?:the|option|choice|letter)\b(?:{_WRAPPING})*)*", re.IGNORECASE)


def chosen_letter(text: str, item: Item) -> str | None:
    """The letter of the choice that a text settles on: after the last "answer is" or "answer:" the letter or the
    choice's own text; without these a last or first line that is a letter, as in "B" or "(b) Paris", or a text that is
    a choice's own."""
    for rest in _after(_CHOSEN, text):
        letter = _leading_choice(rest, item)
        if letter:
            return letter
    lines = [line for line in text.splitlines() if line.strip()]
    for line in (lines[-1], lines[0]) if lines else ():
        labelled = re.match(r"[\s*_(\[]*([A-Za-z])(?:[*_\])]*$|[*_]*[.):\]])", line.rstrip())
        if labelled and labelled[1].upper() in letters(item):
            return labelled[1].upper()
    return _letter_of_text(text.strip().rstrip("."), item)


def _leading_choice(rest: str, item: Item) -> str | None:
    """The choice that a text begins with, by its own text or by its letter."""
    rest = rest[_LEAD.match(rest).end() :]  # type: ignore[union-attr]  # it matches the empty text
    by_length = sorted(zip(item["choices"], letters(item), strict=True), key=lambda pair: -len(pair[0]))
    for choice, letter in by_length:
        if len(choice.strip()) > 1 and re.match(rf"(?:an?\s+)?{re.escape(choice.strip())}(?!\w)", rest, re.IGNORECASE):
            return letter
    # A small a may be the article, so small letters count only where nothing but punctuation follows.
    lettered = re.match(r"([A-Z])(?![\w'+#])|([a-z])(?=[).:,\]*}]|\s*$|\s*\n)", rest)
    letter = (lettered[1] or lettered[2].upper()) if lettered else ""
    if letter in letters(item):
        return letter
    single = re.match(r"(\S)(?![\w'+#])", rest)  # such as the choice "4"
    return _letter_of_text(single[1], item) if single else None


def _letter_of_text(text: str, item: Item) -> str | None:
    same = [x for x, choice in zip(letters(item), item["choices"], strict=True) if _same(choice) == _same(text)]
    return same[0] if len(same) == 1 else None


def _expected_choice(value: Any, item: Item) -> str | None:
    names = letters(item)
    if isinstance(value, int) and not isinstance(value, bool):
        return names[value] if 0 <= value < len(names) else None
    if not isinstance(value, str) or not value.strip():
        return None
    by_text, by_letter = _letter_of_text(value, item), value.strip().upper()
    if by_letter not in names:
        return by_text
    return by_letter if by_text in (None, by_letter) else None  # two choices would fit


# Exact match.


def _same(text: str) -> str:
    """A text without what is not compared: case, the amount of white space, the writing of Unicode."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _expected_text(value: Any, _item: Item) -> str | None:
    return _same(str(value)) or None if isinstance(value, str | int | float) and not isinstance(value, bool) else None


# Programs: HumanEval.

Program = tuple[str, ...]
"""Sources that are run one after the other in one namespace."""

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\2`*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_END = re.compile(r"^(?![ \t#)\]}]|$)", re.MULTILINE)


def program(text: str, item: Item) -> Program | None:
    """The program that a text gives for a HumanEval item: what comes before the function in the prompt (imports,
    helpers), then the first code block that defines the function, or the text itself where it is code. A body alone
    continues the prompt. None where the text holds neither."""
    name, prompt = item["entry_point"], item["prompt"]
    before = re.split(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = [textwrap.dedent(match[3]) if match[1] else match[3] for match in _FENCE.finditer(text)]
    candidates = blocks or [_bare_code(text)]
    defining = [code for code in candidates if re.search(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", code, re.M)]
    complete = [code for code in defining if _defines(name, code)]
    if defining:
        return (before, (complete or defining)[0])
    for body in (body for part in blocks or [text] for body in _bodies(part)):
        continued = prompt.rstrip() + "\n" + body
        if body.strip() and _defines(name, continued, returning=True):
            return (continued,)
    return None


def _bare_code(text: str) -> str:
    """From the first line that begins a definition on, as far as it is Python."""
    begin = re.search(r"^(?:from\s|import\s|def\s|async\s+def\s|class\s|@)", text, re.MULTILINE)
    lines = text[begin.start() :].split("\n") if begin else []
    for count in range(len(lines), 0, -1):
        code = "\n".join(lines[:count])
        if _parsed(code) is not None:
            return code
    return "\n".join(lines)


def _bodies(text: str) -> Iterator[str]:
    """What a function's body may have looked like: as it stands, without its indentation, or without that of its first
    line, which many tokenizers strip; each whole, and cut where the indentation ends."""
    text = text.strip("\n")
    moved = textwrap.indent(textwrap.dedent(text), "    ")
    for body in (text, moved) if text.startswith((" ", "\t")) else (moved, "    " + text):
        end = _END.search(body)
        yield body
        yield body[: end.start()] if end else body


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's escapes
        try:
            tree = ast.parse(code)
            compile(tree, "<answer>", "exec", dont_inherit=True)  # only this refuses a return outside a function
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes; nesting too deep for the parser
            return None
    return tree


def _defines(name: str, code: str, returning: bool = False) -> bool:
    """Whether it is Python that defines the function with more than a docstring, and with a return where that is all
    there is to tell a body from a word or a shell command."""
    tree = _parsed(code)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)] if tree else []
    ends = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)
    return any(
        node.name == name
        and any(map(_does_something, node.body))
        and (not returning or any(isinstance(inner, ends) for inner in ast.walk(node)))
        for node in found
    )


def _does_something(statement: ast.stmt) -> bool:
    idle = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not (idle or isinstance(statement, ast.Pass))


def checks_of(item: Item) -> Program:
    """What must run to its end after the program of a HumanEval item."""
    return (item["test"], f"check({item['entry_point']})")


_number = Task(lambda text, _item: final_number(text), _expected_number, "a number, or end in #### and a number")
_match = Task(lambda text, _item: _same(text) or None, _expected_text, "text or a number")

TASKS = {
    "humaneval": Task(
        program, lambda value, _item: value if isinstance(value, str) else None, "tests", ("prompt", "entry_point")
    ),
    "gsm8k": _number,
    "math": _number,
    "choice": Task(
        chosen_letter,
        _expected_choice,
        "the letter, the index (from 0) or the text of exactly one choice",
        ("choices",),
    ),
    "text": _match,
    "chat": _match,
}
