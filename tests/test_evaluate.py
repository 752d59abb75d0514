"""`evaluate`: graders on many writings, programs that misbehave, intervals against scipy, losses against the models."""

import json
import math
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM

import tiny
from pyramidsd.cli import main
from pyramidsd.tools import sandbox
from pyramidsd.tools.losses import kl
from pyramidsd.tools.prompts import KINDS, Prompt, read_prompts
from pyramidsd.tools.proportions import Pairs, wilson
from pyramidsd.tools.sandbox import Limits, run_program
from pyramidsd.tools.tasks import TASKS, checks_of, chosen_letter, final_number, program, question
from pyramidsd.types import UsageError
from test_cli import refusal, save

# Numbers.

NUMBERS = {
    "The answer is 42": 42,
    "the answer is: 42.": 42,
    "**The answer is: 42**": 42,
    "The answer is $1,430.": 1430,
    "The answer is $1,430.00": 1430,
    "The answer is -7": -7,
    "The answer is \u22127": -7,
    "The answer is -$7.50": Fraction(-15, 2),
    "The answer is $-7": -7,
    "#### 5.0": 5,
    "5 apples, 3 pears.\n#### 8": 8,
    "First 3. The answer is 10. So I checked 3 and 4.": 10,
    "The answer is 3. No wait. The answer is 4.": 4,
    "The answer is 3.\n\nThe answer is": 3,
    "The answer is NUMBER": None,
    "He pays 5 and then 1,000,000 dollars": 1000000,
    "10 - 3 = 7": 7,
    "10-3": 3,
    "10 - 3": 3,
    "(10)-3": 3,
    "- 5 apples": 5,
    "The answer is 3 + 4 = 7": 7,
    "The answer is 8 (since 5 + 3 = 8)": 8,
    "The answer is 2 * $3 = $6.00.": 6,
    "The answer is 3/4": Fraction(3, 4),
    "The answer is 3 / 4.": Fraction(3, 4),
    "5/0": 5,
    "The final answer is $\\boxed{1{,}430}$.": 1430,
    "so $x = \\boxed{-12}$": -12,
    "The answer is \\$20": 20,
    "The answer is 18 dollars per 2 days": 18,
    "The answer is .5": Fraction(1, 2),
    "costs 60%": 60,
    "1, 2, 3": 3,
    "1,2": 2,
    "no idea": None,
    "": None,
    "...": None,
    "in 1999.": 1999,
    "the H2O answer": None,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_final_number(text):
    assert final_number(text) == NUMBERS[text]


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_every_number_is_read_back_however_it_is_written(value):
    amount = f"-${-value:,}" if value < 0 else f"${value:,}"
    for text in (f"The answer is {value}", f"So it is {value:,}.", f"#### {value:f}\n", f"The answer is {amount}."):
        assert final_number("We had 7 before. " + text) == Fraction(value), text


@given(st.text())
def test_any_text_has_a_number_or_none(text):
    number = final_number(text)
    assert number is None or isinstance(number, Fraction)


def test_a_number_that_never_ends():
    """int() refuses more than 4300 digits; a model that repeats itself does not."""
    assert final_number("The answer is " + "1" * 6000) == Fraction(10**6000 - 1, 9)


def of(kind: str, **item) -> Prompt:
    return Prompt("7", kind, (), (), item)


@pytest.mark.parametrize(
    ("kind", "item", "expected"),
    [
        ("gsm8k", {"question": "?", "answer": "3 + 2 = <<3+2=5>>5\n#### 5"}, 5),
        ("gsm8k", {"question": "?", "answer": "#### 1,200"}, 1200),
        ("gsm8k", {"question": "?", "answer": 5.0}, 5),
        ("math", {"prompt": "?", "upstream_answer": "", "expected": "$5"}, 5),
        ("text", {"prompt": "?", "expected": " New  York\n"}, "new york"),
        ("chat", {"messages": [], "answer": 5}, "5"),
        ("choice", {"question": "?", "choices": ["red", "blue"], "answer": "B"}, "B"),
        ("choice", {"question": "?", "choices": ["red", "blue"], "answer": "b"}, "B"),
        ("choice", {"question": "?", "choices": ["red", "blue"], "answer": 1}, "B"),
        ("choice", {"question": "?", "choices": ["red", "blue"], "answer": "Blue"}, "B"),
        ("choice", {"question": "?", "choices": ["3", "4"], "answer": "4"}, "B"),
        ("choice", {"question": "?", "choices": ["A", "B"], "answer": "B"}, "B"),
    ],
)
def test_the_right_answer_of_a_line(kind, item, expected):
    asked = question(of(kind, **item))
    assert (asked.task, asked.expected) == (kind, expected)


@pytest.mark.parametrize(
    ("kind", "item", "task", "cure"),
    [
        ("gsm8k", {"question": "?", "answer": "Paris 2024"}, None, "end in #### and a number"),
        ("gsm8k", {"question": "?", "answer": True}, None, "must be a number"),
        ("choice", {"choices": ["x", "y"], "answer": "C"}, None, "the letter, the index"),
        ("choice", {"choices": ["x", "y"], "answer": 2}, None, "the letter, the index"),
        ("choice", {"choices": ["B", "A"], "answer": "A"}, None, "of exactly one choice"),
        ("text", {"prompt": "?"}, "math", "it has no expected or answer"),
        ("text", {"prompt": "?", "expected": "A"}, "choice", "it has no choices"),
        ("text", {"prompt": "?", "answer": ["a"]}, "text", "must be text or a number"),
        ("text", {"prompt": "?"}, "humaneval", "it has no entry_point, no test"),
    ],
)
def test_a_line_that_cannot_be_graded(kind, item, task, cure):
    with pytest.raises(UsageError, match=r"^prompt '7' cannot be graded as") as refused:
        question(of(kind, **item), task)
    assert cure in str(refused.value)


def test_lines_without_answers_are_not_graded():
    for kind, item in (("spec-bench", {"turns": ["?"]}), ("text", {"prompt": "?"}), ("text", {"answer": None})):
        assert question(of(kind, **item)).task is None


def test_a_task_takes_the_answers_of_another_format():
    asked = question(of("text", prompt="What is 2 + 3?", answer="5"), "gsm8k")
    assert TASKS["gsm8k"].found("It is 5.", {}) == asked.expected


def test_every_task_is_a_format():
    assert set(TASKS) < set(KINDS)


# Choices.

COLOURS = {"choices": ["red", "dark red", "a banana", "4"]}
LETTERS = {
    "The answer is B": "B",
    "The answer is (b).": "B",
    "the answer is: **B**": "B",
    "The correct answer is B) dark red": "B",
    "The answer is B because red is A": "B",
    "The answer is red": "A",
    "The answer is dark red.": "B",
    "The answer is a banana": "C",
    "The answer is a": "A",
    "The answer is a bird": None,
    "The answer is 4": "D",
    "The answer is 40": None,
    "The answer is E": None,
    "The answer is option C.": "C",
    "The answer is the option: C": "C",
    "The correct option is D.": "D",
    "Answer: C": "C",
    "Answer: A. No. Answer: D": "D",
    "The answer is $\\boxed{\\text{C}}$": "C",
    "\\boxed{C}": "C",
    "B": "B",
    "(c)": "C",
    "Thinking.\nB) dark red": "B",
    "D. 4\nThis is even.": "D",
    "Dark  red.": "B",
    "A cat sat.": None,
    "I do not know": None,
    "Better not": None,
    "The answer is not B": None,
    "": None,
    "\n \n": None,
}


@pytest.mark.parametrize("text", LETTERS)
def test_the_chosen_letter(text):
    assert chosen_letter(text, COLOURS) == LETTERS[text]


def test_letters_before_texts_that_look_like_them():
    languages = {"choices": ["Java", "C++", "C"]}
    assert chosen_letter("The answer is C++", languages) == "B"
    assert chosen_letter("The answer is C", languages) == "C"
    assert chosen_letter("The answer is C#", languages) is None


@given(st.text())
def test_any_text_has_a_letter_or_none(text):
    assert chosen_letter(text, COLOURS) in ("A", "B", "C", "D", None)


@pytest.mark.parametrize("text", ["New York", " new\nYORK  ", "\uff2eew York"])
def test_exact_match_leaves_out_case_and_spaces(text):
    asked = question(of("text", prompt="?", expected="New York"))
    assert TASKS["text"].found(text, {}) == asked.expected
    assert TASKS["text"].found("New York.", {}) != asked.expected


# Programs.

ADD = {
    "task_id": "a",
    "prompt": "from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n"
    '    """Add them up.\n    >>> total([1, 2])\n    3\n    """\n',
    "canonical_solution": "    result = 0\n    for number in numbers:\n        result += number\n    return result\n",
    "test": "def check(candidate):\n    assert candidate([]) == 0\n    assert candidate([1, 2, 3]) == 6\n",
    "entry_point": "total",
}
HELPED = {
    "task_id": "b",
    "prompt": "import math\n\ndef area(r):\n    return math.pi * r ** 2\n\n"
    'def ring(a, b):\n    """Area between two circles."""\n',
    "canonical_solution": "    return abs(area(a) - area(b))\n",
    "test": "import math\ndef check(candidate):\n    assert abs(candidate(2, 1) - 3 * math.pi) < 1e-9\n",
    "entry_point": "ring",
}
IMPORTS_INSIDE = {
    "task_id": "c",
    "prompt": 'def up(x):\n    import math\n    """Round up."""\n',
    "canonical_solution": "    y = math.ceil(x)\n    return y\n",
    "test": "def check(candidate):\n    assert candidate(1.2) == 2\n",
    "entry_point": "up",
}
ITEMS = [ADD, HELPED, IMPORTS_INSIDE]

WRITINGS = {
    "the whole function in a block": lambda item, whole, alone, body: f"Sure!\n\n```python\n{whole}```\nIt adds.",
    "the function alone": lambda item, whole, alone, body: f"```\n{alone}```",
    "a block that never ends": lambda item, whole, alone, body: f"```py\n{whole}",
    "a block in a list": lambda item, whole, alone, body: "1. So:\n   ```python\n" + indented(whole, 3) + "   ```\n",
    "tildes": lambda item, whole, alone, body: f"~~~python\n{whole}~~~\n",
    "no block": lambda item, whole, alone, body: f"Here it is:\n{whole}\nThis works, isn't it?",
    "a body": lambda item, whole, alone, body: body,
    "a body, then words": lambda item, whole, alone, body: body + "\nThis works, isn't it?\n",
    "a body without its first spaces": lambda item, whole, alone, body: body.strip(),
    "a body without spaces": lambda item, whole, alone, body: "```\n" + body.replace("\n    ", "\n")[4:] + "```",
    "a stub first": lambda item, whole, alone, body: f"```python\n{item['prompt']}```\nbecomes\n```python\n{whole}```",
    "an example first": lambda item, whole, alone, body: f"```\npip install x\n```\n```python\n{alone}```",
    "a future import": lambda item, whole, alone, body: f"```python\nfrom __future__ import annotations\n{alone}```",
    "an escape that warns": lambda item, whole, alone, body: f'```python\nx = "\\d"\n{alone}```',
    "a main part": lambda item, whole, alone, body: f"```python\n{whole}\nif __name__ == '__main__':\n    input()\n```",
    "Windows lines": lambda item, whole, alone, body: f"```python\n{whole}```".replace("\n", "\r\n"),
}


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("writing", WRITINGS)
def test_a_program_is_found_and_passes(writing):
    for item in ITEMS if writing in ("the function alone", "a body without its first spaces") else ITEMS[:1]:
        whole = item["prompt"] + item["canonical_solution"]
        alone = whole[whole.index("def " + item["entry_point"]) :]
        found = program(WRITINGS[writing](item, whole, alone, item["canonical_solution"]), item)
        assert found is not None
        assert run_program([*found, *checks_of(item)]).status == "passed", found


def test_a_body_after_imports_inside_the_function():
    for body in (IMPORTS_INSIDE["canonical_solution"], "y = math.ceil(x)\nreturn y"):
        found = program(body, IMPORTS_INSIDE)
        assert run_program([*found, *checks_of(IMPORTS_INSIDE)]).status == "passed"


@pytest.mark.parametrize(
    "text", ["", "I cannot do that.", "```\nls -l\n```", "```python\n```", "def other():\n    pass"]
)
def test_no_program(text):
    assert program(text, ADD) is None


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("result += number", "result -= number", ("failed", "AssertionError")),
        ("return result", "return", ("failed", "AssertionError")),
        ("return result", "return reslt", ("failed", "NameError")),
        ("result = 0", "result = (", ("failed", "SyntaxError")),
    ],
)
def test_a_wrong_program_fails(old, new, verdict):
    code = (ADD["prompt"] + ADD["canonical_solution"]).replace(old, new)
    found = run_program([*program(f"```python\n{code}```", ADD), *checks_of(ADD)])
    assert (found.status, found.detail) == verdict


SMALL = Limits(cpu_seconds=1, wall_seconds=3.0, memory=1 << 28, file_size=1 << 20, processes=8)
QUICK = Limits(cpu_seconds=1, wall_seconds=1.0, memory=1 << 28, file_size=1 << 20, processes=8)

MISBEHAVING = {
    "loops for ever": ("while True: pass", SMALL, "timeout"),
    "sleeps for ever": ("import time; time.sleep(60)", QUICK, "timeout"),
    "allocates without end": ("x = []\nwhile True: x.append(bytearray(1 << 20))", SMALL, "memory"),
    "allocates at once": ("x = [0] * 10**10", SMALL, "memory"),
    "prints without end": ("while True: print('x' * 10000)", SMALL, "timeout"),
    "writes a file without end": ("with open('x', 'wb') as f:\n while True: f.write(bytes(100000))", SMALL, "failed"),
    "leaves at once": ("import os; os._exit(0)", SMALL, "crashed"),
    "leaves politely": ("import sys; sys.exit(0)", SMALL, "failed"),
    "raises SystemExit": ("raise SystemExit", SMALL, "failed"),
    "interrupts itself": ("raise KeyboardInterrupt", SMALL, "failed"),
    "prints what a report may look like": ("print('passed', flush=True)\nimport os; os._exit(0)", SMALL, "crashed"),
    "says so everywhere": (
        "import os\nfor file in range(256):\n try: os.write(file, b'0 passed')\n except OSError: pass\nos._exit(0)",
        SMALL,
        "crashed",
    ),
    "recurses without end": ("def f(): return f()\nf()", SMALL, "failed"),
    "reads a null pointer": ("import ctypes; ctypes.string_at(0)", SMALL, "crashed"),
    "kills its group": ("import os; os.kill(0, 9)", SMALL, "crashed"),
    "closes every file": ("import os; os.closerange(0, 1000)\nassert 0", SMALL, "crashed"),
    "reads input": ("input()", SMALL, "failed"),
    "is no text": ("\0", SMALL, "failed"),
    "names an exception oddly": ("class E(Exception): pass\nE.__name__ = 'passed ' * 99\nraise E", SMALL, "failed"),
}


@pytest.fixture(params=["namespaces", "none"])
def apart(request, monkeypatch):
    """With what the system has to keep programs apart, and without it."""
    sandbox._namespaces.cache_clear()
    if request.param == "none":
        monkeypatch.setenv("PATH", "")
    if request.param == "namespaces" and not sandbox._namespaces():
        pytest.skip("no namespaces here")
    yield request.param == "namespaces"
    sandbox._namespaces.cache_clear()


@pytest.mark.parametrize("case", MISBEHAVING)
def test_a_program_that_misbehaves(case):
    source, limits, status = MISBEHAVING[case]
    begun = time.monotonic()
    assert run_program([source, "check = 1"], limits).status == status
    assert time.monotonic() - begun < limits.wall_seconds + 3


def test_limits_hold_without_namespaces_too(apart):
    for case in ("allocates without end", "writes a file without end", "leaves at once"):
        source, limits, status = MISBEHAVING[case]
        assert run_program([source], limits).status == status
    assert run_program(["x = 1", "assert x"], SMALL).status == "passed"


def test_children_do_not_outlive_their_program(apart):
    """A sleeping child runs the sandbox's script, as its parent does, and nothing that does is left afterwards."""
    stay = "import os, time\nif os.fork() == 0:\n " + ("os.setsid()\n " if apart else "") + "time.sleep(60)\n"
    before = sleepers()
    assert run_program([stay], SMALL).status in ("passed", "failed")  # without namespaces only root may fork
    assert run_program([stay + "time.sleep(60)"], QUICK).status in ("timeout", "failed")
    deadline = time.monotonic() + 5
    while sleepers() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers() <= before


def sleepers() -> set[str]:
    """The processes that run the sandbox's script."""
    script = str(Path(sandbox.__file__)).encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if script in command:
            found.add(folder.name)
    return found


def test_a_program_sees_nothing_of_the_user(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    inherited = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        source = (
            "import os, sys\n"
            "assert 'SECRET' not in os.environ and 'PATH' not in os.environ\n"
            "assert os.listdir() == [] and not any('site-packages' in path for path in sys.path)\n"
            f"try: os.fstat({inherited})\nexcept OSError: pass\nelse: raise AssertionError\n"
        )
        assert run_program([source]).status == "passed"
    finally:
        os.close(inherited)


def test_a_program_can_write_nowhere_else_and_reach_nobody(apart, tmp_path):
    if not apart:
        pytest.skip("needs namespaces")
    keep = tmp_path / "keep"
    keep.write_text("kept")
    many = "i = 0\nwhile True:\n i += 1\n open(str(i), 'wb').write(bytes(1 << 19))"
    for source in (
        f"import os; os.remove({str(keep)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        many,
    ):
        assert run_program([source], SMALL).detail == "OSError"
    assert [*tmp_path.iterdir()] == [keep]


def test_verdicts_are_the_same_every_time():
    order = "assert list({'a', 'b', 'c', 'd', 'e'}) == ['a', 'b', 'c', 'd', 'e']"
    assert len({run_program([order]).status for _ in range(4)}) == 1


def test_classes_of_a_program_know_their_module():
    source = "from dataclasses import dataclass\n@dataclass\nclass P:\n x: 'int' = 1\nassert P() == P(1)"
    assert run_program([source]).status == "passed"


# Intervals.


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_that_of_scipy(counts):
    right, answers = counts
    oracle = binomtest(right, answers).proportion_ci(0.95, "wilson")
    assert wilson(right, answers) == pytest.approx((oracle.low, oracle.high), abs=1e-12)


def test_wilson_needs_answers():
    with pytest.raises(ValueError, match="no answers"):
        wilson(0, 0)


@pytest.mark.parametrize(
    ("table", "interval"),
    [
        ((36, 12, 2, 0), (0.0569, 0.3404)),  # Newcombe 1998
        ((1, 1, 7, 12), (-0.507, -0.026)),  # the airway example of Fagerland, Lydersen and Laake
    ],
)
def test_the_paired_interval_gives_published_examples(table, interval):
    assert Pairs(*table).interval() == pytest.approx(interval, abs=6e-4)


tables = st.tuples(*[st.integers(0, 40)] * 4).filter(any)


@given(tables)
def test_the_paired_interval_holds_the_difference_and_can_be_turned_round(table):
    pairs = Pairs(*table)
    low, high = pairs.interval()
    assert -1 - 1e-9 <= low <= pairs.difference <= high <= 1 + 1e-9
    assert Pairs(table[0], table[2], table[1], table[3]).interval() == pytest.approx((-high, -low))


@given(tables)
def test_the_p_value_is_that_of_a_fair_coin(table):
    discordant = table[1] + table[2]
    oracle = binomtest(table[1], discordant, 0.5).pvalue if discordant else 1.0
    assert Pairs(*table).p_value == pytest.approx(oracle)


# Losses.


def test_the_divergence_in_nats():
    law, other = torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([[0.25, 0.5, 0.25]]).double()
    assert kl(law, other).item() == pytest.approx(0.5 * math.log(2))
    assert kl(other, law).item() == math.inf
    assert kl(law, law).item() == 0


# The verb.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and a draft with weights of its own."""
    folder = tmp_path_factory.mktemp("models")
    return str(save(folder / "target")), str(save(folder / "draft", seed=1))


def evaluated(capsys, *arguments) -> list[dict]:
    assert main(["evaluate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def written(path: Path, *items) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def answers_of(path: Path) -> list[dict]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "answer"]


def pyramid(models) -> list[str]:
    return ["--target", models[0], "--draft", models[1], "--qualifier", "layers:2", "--max-new-tokens", "12"]


ASKED = ["abcabc", "hello there", "zebra", "quick brown"]


@pytest.fixture(scope="module")
def half_right(tmp_path_factory, models):
    """Prompts of which plain decoding answers half as expected."""
    folder = tmp_path_factory.mktemp("prompts")
    record = folder / "record.jsonl"
    unlabelled = written(folder / "unlabelled.jsonl", *({"prompt": text} for text in ASKED))
    assert main(["evaluate", "--json", "--methods", "plain", "--prompts", str(unlabelled), "--record", str(record),
                 *pyramid(models)]) == 0  # fmt: skip
    said = {line["prompt"]: "".join(line["pieces"]) for line in answers_of(record)}
    items = [{"prompt": text, "expected": said[str(i)] if i % 2 else "no"} for i, text in enumerate(ASKED, 1)]
    return written(folder / "prompts.jsonl", *items)


def test_exact_methods_lose_nothing(models, half_right, capsys):
    rows = evaluated(capsys, "--methods", "sd,nested", "--prompts", half_right, *pyramid(models))
    assert [row["method"] for row in rows] == ["plain", "sd", "nested"]
    for row in rows:
        assert (row["answers"], row["graded"], row["right"], row["accuracy"]) == (4, 4, 2, 0.5)
        assert row["accuracy_interval"] == pytest.approx(binomtest(2, 4).proportion_ci(0.95, "wilson"), abs=1e-12)
        assert (row["drop_from_plain"], row["better"], row["worse"], row["same_as_plain"]) == (0, 0, 0, 1)
        assert (row["deviation"], row["worst_deviation"], row["regret"], row["chosen"], row["kl"]) == (0, 0, 0, 1, None)
        assert row["parse_failures"] == 0
        assert row["cut_short"] == 4
        assert row["tokens_per_second"] > 0
    assert rows[1]["p_value"] == 1
    assert rows[1]["drop_interval"] == pytest.approx([100 * bound for bound in Pairs(2, 0, 0, 2).interval()])


def test_a_lossy_method_loses(models, half_right, capsys):
    rows = evaluated(capsys, "--methods", "fsd", "--tau-t", "0.69", "--prompts", half_right, *pyramid(models))
    plain, lossy = rows
    assert (plain["right"], lossy["right"]) == (2, 0)
    assert (lossy["drop_from_plain"], lossy["better"], lossy["worse"], lossy["p_value"]) == (50, 0, 2, 0.5)
    assert lossy["thresholds"] == [0.69]
    assert lossy["num_draft_tokens"]
    assert lossy["deviation"] > 0
    assert lossy["regret"] > 0
    assert lossy["chosen"] < 1


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_losses_are_those_of_the_models_own_rows(temperature, models, half_right, tmp_path, capsys):
    """The oracle: one forward of each transformers model over prompt and answer. A kept token of fuzzy acceptance has
    the draft's law, every other one the target's."""
    record = tmp_path / "record.jsonl"
    rows = evaluated(
        capsys, "--methods", "fsd", "--tau-t", "0.4", "--prompts", half_right, "--record", record,
        "--temperature", temperature, *pyramid(models),
    )  # fmt: skip
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in models)
    letters = "abcdefghijklmnopqrstuvwxyz "
    regrets, chosen, divergences = [], [], []
    for line in answers_of(record):
        prompt = [letters.index(letter) for letter in ASKED[int(line["prompt"]) - 1]]
        tokens = line["token_ids"]
        log_p, log_q = (
            tiny.fresh_rows(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1) for model in (target, draft)
        )
        own = log_p[range(len(tokens)), tokens]
        assert line["regret"] == pytest.approx((log_p.amax(-1) - own).tolist(), abs=1e-3)
        assert line["chosen"] == (log_p.argmax(-1) == torch.tensor(tokens)).tolist()
        if line["setting"] != "plain":
            regrets += line["regret"]
            chosen += line["chosen"]
            whole = (log_q.exp() * (log_q - log_p)).sum(-1).tolist()
            divergences += [value if lost else 0 for value, lost in zip(whole, line["deviation"], strict=True)]
            if temperature == "1":
                assert line["kl"] == pytest.approx(divergences[-len(tokens) :], rel=1e-3, abs=1e-6)
    lossy = rows[1]
    assert lossy["regret"] == pytest.approx(sum(regrets) / len(regrets))
    assert lossy["chosen"] == pytest.approx(sum(chosen) / len(chosen))
    if temperature == "1":
        assert rows[0]["kl"] == 0
        assert lossy["kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-3)
        assert any(divergences)
        assert not all(divergences)
    else:
        assert lossy["kl"] is None


def test_an_infinite_divergence_is_not_made_a_number(models, half_right, capsys):
    """top-k 1 leaves each model one token."""
    rows = evaluated(
        capsys, "--methods", "fsd", "--tau-t", "0.69", "--prompts", half_right, "--temperature", "1", "--top-k", "1",
        *pyramid(models),
    )  # fmt: skip
    assert [row["kl"] for row in rows] == [0, None]


TIMES = {"tokens_per_second", "speedup_over_plain"}


def test_a_stopped_run_is_taken_up(models, half_right, tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    arguments = [
        "--methods", "psd,sd", "--prompts", half_right, "--rounds", "2", "--temperature", "1", "--record", record,
        *pyramid(models),
    ]  # fmt: skip
    first = evaluated(capsys, *arguments)
    whole = answers_of(record)
    assert len(whole) == 3 * 4 * 2
    assert {line["seed"] - line["round"] for line in whole} == {0}
    data = record.read_bytes()
    record.write_bytes(data[: len(data) // 2])
    again = evaluated(capsys, *arguments)
    for old, new in zip(first, again, strict=True):
        assert {k: v for k, v in old.items() if k not in TIMES} == {k: v for k, v in new.items() if k not in TIMES}
    finished = record.read_bytes()
    evaluated(capsys, *arguments)
    assert answers_of(record) == [json.loads(x) for x in finished.splitlines() if b'"answer"' in x[:20]]


def test_a_record_of_other_answers_is_refused(models, half_right, tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    other = half_right.parent / "other" / half_right.name
    other.parent.mkdir()
    written(other, *({"prompt": text, "expected": "yes"} for text in ASKED))
    evaluated(capsys, "--methods", "plain", "--prompts", half_right, "--record", record, *pyramid(models))
    line = refusal(capsys, "evaluate", "--methods", "plain", "--prompts", str(other), "--record", str(record),
                   *pyramid(models))  # fmt: skip
    assert "other settings (graded)" in line


def test_baselines_of_another_library_have_no_laws(models, half_right, capsys):
    rows = evaluated(capsys, "--methods", "hf-plain", "--prompts", half_right, *pyramid(models))
    assert [row["setting"] for row in rows] == ["plain", "hf-plain"]
    assert (rows[1]["right"], rows[1]["drop_from_plain"]) == (2, 0)
    assert [rows[1][key] for key in ("deviation", "worst_deviation", "kl", "regret", "chosen")] == [None] * 5


def test_prompts_without_answers_are_evaluated_without(models, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\nhello\n")
    rows = evaluated(capsys, "--methods", "psd", "--prompts", path, *pyramid(models))
    for row in rows:
        assert (row["answers"], row["graded"], row["parse_failures"]) == (2, 0, 0)
        assert row["accuracy"] is row["accuracy_interval"] is row["drop_from_plain"] is row["better"] is None
        assert row["regret"] is not None
    assert main(["evaluate", "--methods", "psd", "--prompts", str(path), *pyramid(models)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(json.loads(last)["rows"]) == 2
    assert any("regret" in line for line in table)


def test_generated_programs_run_only_where_that_is_allowed(models, tmp_path, capsys):
    path = written(tmp_path / "prompts.jsonl", *ITEMS)
    room = ["--target", models[0], "--max-new-tokens", "4", "--methods", "plain", "--prompts", str(path)]
    assert "--run-generated-code" in refusal(capsys, "evaluate", *room)
    assert read_prompts(path)[0].task == "humaneval"


BAD_USE = {
    "unknown method": ("{}", ["--methods", "psdx"], "unknown method 'psdx'"),
    "unknown task": ("{}", ["--task", "poetry"], "--task"),
    "no rounds": ("{}", ["--rounds", "0"], "rounds must be at least 1"),
    "greedy rounds": ("{}", ["--rounds", "2"], "use --rounds 1, or set --temperature"),
    "no tokens": ("{}", ["--max-new-tokens", "0"], "at least 1"),
    "wrong format": ('{"prompt": "a"}\n{"text": "b"}', [], "line 2 is in no known format"),
    "no answers": ('{"prompt": "a"}', ["--task", "math"], "prompt '1' cannot be graded as math: it has no expected"),
    "a bad answer": ('{"question": "a", "answer": "b"}', [], "must be a number"),
    "no such recipe": ('{"prompt": "a"}', ["--recipe", "nowhere.toml"], "check the path"),
}


@pytest.mark.parametrize("case", BAD_USE)
def test_bad_use_gets_one_line_with_the_cure(case, models, tmp_path, capsys):
    text, arguments, cure = BAD_USE[case]
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert cure in refusal(capsys, "evaluate", "--prompts", str(path), "--target", models[0], *arguments)


def test_a_recipe_sets_what_is_compared(models, half_right, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[run]]\nmethods = ["fsd"]\ntau_t = [0.0, 0.69]\n')
    rows = evaluated(capsys, "--recipe", recipe, "--prompts", half_right, "--limit", "2", *pyramid(models))
    assert [row["thresholds"] for row in rows] == [[], [0.0], [0.69]]
    assert [row["answers"] for row in rows] == [2, 2, 2]
