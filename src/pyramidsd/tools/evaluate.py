"""Measure quality: right answers against plain decoding on the same prompts and seeds, and losses without labels."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from pyramidsd.generate import check_limits
from pyramidsd.models.hf import quiet
from pyramidsd.sampling import Sampling
from pyramidsd.tools.contest import Contest, Setting, pending
from pyramidsd.tools.grading import check_code, graded
from pyramidsd.tools.losses import Losses
from pyramidsd.tools.prompts import add_prompt_arguments, prompt_facts, prompts_from
from pyramidsd.tools.proportions import Pairs, wilson
from pyramidsd.tools.recipes import add_setting_arguments, settings_from
from pyramidsd.tools.records import Record
from pyramidsd.tools.summary import Line, rows
from pyramidsd.tools.tasks import TASKS, Question, question
from pyramidsd.tools.terminal import busy, out
from pyramidsd.types import UsageError

BASELINE = "plain"
WARM_UP_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    add_prompt_arguments(parser)
    parser.add_argument(
        "--task",
        choices=TASKS,
        metavar="NAME",
        help=f"how answers are graded: {', '.join(TASKS)}; default by the format of each line",
    )
    parser.add_argument(
        "--run-generated-code",
        action="store_true",
        help="grade programs by running them, under limits that guard against accidents and not against malice",
    )
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="per turn; default 512")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="seeds per prompt; default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first round; default 0")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep every answer (JSONL), and take up a stopped run"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON document only")
    add_setting_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate what is not in the record yet, then print a table and one JSON document."""
    quiet()
    check_limits(args.max_new_tokens, ())
    settings = with_baseline(settings_from(args))
    _check_rounds(args.rounds, settings[0].config.sampling)
    prompts = prompts_from(args)
    questions = [question(prompt, args.task) for prompt in prompts]
    check_code(questions, args.run_generated_code)
    with busy("Loading models"):
        contest = Contest(settings)
    record = Record(
        args.record,
        {
            "verb": "evaluate",
            "prompts": prompt_facts(args, prompts),
            "graded": _digest(questions),
            "max_new_tokens": args.max_new_tokens,
            "seed": args.seed,
            "dtype": str(contest.target.model.dtype).removeprefix("torch."),
            "settings": [setting.line() | {"megabytes": contest.megabytes(setting)} for setting in settings],
        },
    )
    evaluate(contest, settings, questions, args, record)
    table = quality(record.of_kind("run")[-1]["settings"], record.of_kind("answer"))
    if not args.json:
        out.print(_table(table))
    print(json.dumps({"rows": table}, allow_nan=False))  # noqa: T201  as it is: a console would wrap it
    return 0


def with_baseline(settings: Sequence[Setting]) -> list[Setting]:
    """The settings with plain decoding of their target among them."""
    if any(setting.name == BASELINE for setting in settings):
        return list(settings)
    return [Setting.of(BASELINE, settings[0].config), *settings]


def _check_rounds(rounds: int, sampling: Sampling) -> None:
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1, got {rounds}")
    if rounds > 1 and sampling.temperature == 0:
        raise UsageError(f"greedy answers are the same in all {rounds} rounds; use --rounds 1, or set --temperature")


def _digest(questions: Sequence[Question]) -> str:
    answers = json.dumps([[q.prompt.id, q.task, str(q.expected)] for q in questions])
    return hashlib.sha256(answers.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def evaluate(
    contest: Contest,
    settings: Sequence[Setting],
    questions: Sequence[Question],
    args: argparse.Namespace,
    record: Record,
) -> None:
    """Ask every setting every question with every seed, grade the answer, and add it to the record."""
    jobs = pending(settings, [asked.prompt for asked in questions], args.rounds, record)
    if not jobs:
        return
    with busy("Warming up", len(settings)) as advance:
        for setting in settings:
            contest.reply(setting, questions[0].prompt, min(WARM_UP_TOKENS, args.max_new_tokens), args.seed)
            advance(1)
    with busy("Evaluating", len(jobs)) as advance:
        for setting, i, round_ in jobs:
            asked = questions[i]
            seed, losses = args.seed + round_, Losses(setting.config.sampling)
            reply = contest.reply(setting, asked.prompt, args.max_new_tokens, seed, losses.watch)
            which = {"setting": setting.name, "prompt": asked.prompt.id, "round": round_, "seed": seed}
            record.add("answer", which | reply.line() | losses.line() | graded(asked, reply.texts[-1]))
            advance(1)


def quality(settings: Sequence[Line], answers: Sequence[Line]) -> list[dict[str, Any]]:
    """One row per setting: the right answers, the drop against plain decoding, the label-free losses, the speed.

    `drop_from_plain` and `drop_interval` are in percentage points, over answers to the same prompt with the same seed;
    all means of losses are over tokens.

    Args:
        settings: their lines in the record.
        answers: answer lines, of any settings.
    """
    by_setting: dict[str, list[Line]] = {setting["name"]: [] for setting in settings}
    for answer in answers:
        by_setting.setdefault(answer["setting"], []).append(answer)
    plain = by_setting.get(BASELINE, [])
    return [
        {key: row[key] for key in _OF_BENCH} | _right(by_setting[row["setting"]], plain) | _losses(row, by_setting)
        for row in rows(settings, answers, BASELINE)
    ]


_OF_BENCH = (
    "method",
    "setting",
    "models",
    "num_draft_tokens",
    "thresholds",
    "answers",
    "tokens",
    "tokens_per_second",
    "speedup_over_plain",
    "tokens_per_target_pass",
    "acceptance",
    "same_as_plain",
    "deviation",
    "worst_deviation",
)


def _losses(row: Line, by_setting: Mapping[str, Sequence[Line]]) -> dict[str, float | None]:
    answers = by_setting[row["setting"]]
    return {key: _mean(answer[key] for answer in answers) for key in ("kl", "regret", "chosen")}


def _mean(lists: Iterable[Sequence[float | None] | None]) -> float | None:
    """Of all entries of all lists; None where any is unknown."""
    values: list[float] = []
    for entries in lists:
        known = [entry for entry in entries or () if entry is not None]
        if entries is None or len(known) < len(entries):
            return None
        values += known
    return fmean(values) if values else None


def _right(answers: Sequence[Line], plain: Sequence[Line]) -> dict[str, Any]:
    """How many answers are right, by themselves and beside those of plain decoding."""
    compared = [answer for answer in answers if answer["correct"] is not None]
    right = sum(answer["correct"] for answer in compared)
    return {
        "graded": len(compared),
        "right": right,
        "accuracy": right / len(compared) if compared else None,
        "accuracy_interval": wilson(right, len(compared)) if compared else None,
        **_drop(compared, plain),
        "parse_failures": sum(not answer["parsed"] for answer in compared),
        "cut_short": sum(answer["finish_reason"] == "length" for answer in answers),
    }


def _drop(compared: Sequence[Line], plain: Sequence[Line]) -> dict[str, Any]:
    of_plain = {(answer["prompt"], answer["round"]): answer["correct"] for answer in plain}
    pairs = [
        (of_plain[key], answer["correct"])
        for answer in compared
        if (key := (answer["prompt"], answer["round"])) in of_plain
    ]
    if not pairs:
        return dict.fromkeys(("drop_from_plain", "drop_interval", "p_value", "better", "worse"))
    counts = Pairs.of(pairs)
    itself = compared[0]["setting"] == BASELINE
    return {
        "drop_from_plain": 100 * counts.difference,
        "drop_interval": None if itself else [100 * bound for bound in counts.interval()],
        "p_value": None if itself else counts.p_value,
        "better": counts.only_other,
        "worse": counts.only_one,
    }


def _table(table_rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "setting", "right", "95 %", "drop", "95 %", "better/worse", "unparsed", "deviation", "KL", "regret", "chosen",
        "tokens/s", "over plain",
    )  # fmt: skip
    for row in table_rows:
        table.add_row(
            Text(row["setting"]),
            _shown(row["accuracy"], "{:.1%}"),
            _shown(row["accuracy_interval"], "{0[0]:.1%} to {0[1]:.1%}"),
            _shown(row["drop_from_plain"], "{:+.1f}"),
            _shown(row["drop_interval"], "{0[0]:+.1f} to {0[1]:+.1f}"),
            f"{_shown(row['better'])}/{_shown(row['worse'])}",
            f"{row['parse_failures']}",
            _shown(row["deviation"], "{:.3f}"),
            _shown(row["kl"], "{:.4f}"),
            _shown(row["regret"], "{:.3f}"),
            _shown(row["chosen"], "{:.1%}"),
            f"{row['tokens_per_second']:.2f}",
            _shown(row["speedup_over_plain"], "{:.2f}"),
        )
    table.caption = (
        "drop: points below plain decoding on the same prompts and seeds; better/worse: answers right where plain "
        "decoding is wrong, and the reverse; KL and regret: nats per token; chosen: tokens that are the target's argmax"
    )
    return table


def _shown(value: Any, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)
