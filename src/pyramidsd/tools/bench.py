"""Measure speed, acceptance and deviation: methods x settings x prompts, interleaved, with plain decoding beside."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pyramidsd.generate import check_limits
from pyramidsd.models.base import Model
from pyramidsd.models.hf import quiet
from pyramidsd.tools.contest import PEER_WINDOWS, Contest, Setting, pending
from pyramidsd.tools.prompts import Prompt, add_prompt_arguments, prompt_facts, prompts_from
from pyramidsd.tools.recipes import add_setting_arguments, settings_from
from pyramidsd.tools.records import Record
from pyramidsd.tools.summary import rows, speed
from pyramidsd.tools.terminal import busy, out
from pyramidsd.tools.traces import trace
from pyramidsd.types import UsageError

WARM_UP_TOKENS = 2
TUNING_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    add_prompt_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per turn; default 128")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often everything is asked; default 3")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep every answer (JSONL), and take up a stopped run"
    )
    parser.add_argument("--trace", action="store_true", help="record the entropy of every model at every position too")
    parser.add_argument("--json", action="store_true", help="print the JSON document only")
    add_setting_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what is not in the record yet, then print a table and one JSON document."""
    quiet()
    check_limits(args.max_new_tokens, ())
    if args.rounds < 1:
        raise UsageError(f"rounds must be at least 1, got {args.rounds}")
    settings = settings_from(args)
    prompts = prompts_from(args)
    with busy("Loading models"):
        contest = Contest(settings)
    record = Record(
        args.record,
        {
            "verb": "bench",
            "prompts": prompt_facts(args, prompts),
            "max_new_tokens": args.max_new_tokens,
            "seed": args.seed,
            "dtype": str(contest.target.model.dtype).removeprefix("torch."),
            "settings": [setting.line() | {"megabytes": contest.megabytes(setting)} for setting in settings],
        },
    )
    measure(contest, settings, prompts, args, record)
    if args.trace:
        _trace(contest, settings, prompts, record)
    table = rows(record.of_kind("run")[-1]["settings"], record.of_kind("answer"))
    if not args.json:
        out.print(_table(table))
    print(json.dumps({"rows": table}))  # noqa: T201  as it is: a console would wrap it
    return 0


def measure(
    contest: Contest, settings: Sequence[Setting], prompts: Sequence[Prompt], args: argparse.Namespace, record: Record
) -> None:
    """Ask every setting every prompt in every round, and add each answer to the record."""
    jobs = pending(settings, prompts, args.rounds, record)
    if not jobs:
        return
    tuned = {setting: _tuned(contest, setting, prompts, args, record) for setting in settings}
    with busy("Warming up", len(settings)) as advance:
        for setting in settings:
            contest.reply(tuned[setting], prompts[0], min(WARM_UP_TOKENS, args.max_new_tokens), args.seed)
            advance(1)
    with busy("Measuring", len(jobs)) as advance:
        for setting, i, round_ in jobs:
            seed = args.seed + round_
            reply = contest.reply(tuned[setting], prompts[i], args.max_new_tokens, seed)
            which = {"setting": setting.name, "prompt": prompts[i].id, "round": round_, "seed": seed}
            record.add("answer", which | reply.line())
            advance(1)


def _trace(contest: Contest, settings: Sequence[Setting], prompts: Sequence[Prompt], record: Record) -> None:
    """One line per prompt: the entropy of every model before each token of the first answer of plain decoding."""
    of_plain = [setting.name for setting in settings if setting.method in ("plain", "hf-plain")]
    if not of_plain:
        raise UsageError("--trace follows the answers of plain decoding; add plain to the methods")
    longest = max(settings, key=lambda setting: len(setting.models))
    models = {Path(name).name: model for name, model in zip(longest.models, contest.models(longest), strict=True)}
    answers = {line["prompt"]: line for line in record.of_kind("answer") if line["setting"] == of_plain[0]}
    done = {line["prompt"] for line in record.of_kind("trace")}
    missing = [prompt for prompt in prompts if prompt.id not in done]
    with busy("Tracing", len(missing)) as advance:
        for prompt in missing:
            context, answer = contest.first_turn(prompt, answers[prompt.id])
            found = trace({n: m for n, m in models.items() if isinstance(m, Model)}, contest.target, context, answer)
            entropy = [[round(value, 4) for value in found.entropy.get(name, [])] for name in models]
            record.add("trace", {"prompt": prompt.id, "models": list(models), "entropy": entropy})
            advance(1)


def _tuned(
    contest: Contest, setting: Setting, prompts: Sequence[Prompt], args: argparse.Namespace, record: Record
) -> Setting:
    """A peer with the window that answers the first prompt fastest; other settings as they are."""
    if setting.method not in ("hf-assisted", "hf-prompt-lookup"):
        return setting
    known = [line for line in record.of_kind("tuned") if line["setting"] == setting.name]
    if not known:
        tokens = min(TUNING_TOKENS, args.max_new_tokens)
        with busy(f"Tuning {setting.name}", len(PEER_WINDOWS)) as advance:
            speeds = {}
            for window in PEER_WINDOWS:
                trial = replace(setting, num_assistant_tokens=window)
                line = contest.reply(trial, prompts[0], tokens, args.seed).line()
                speeds[window] = speed(line)
                advance(1)
        best = max(speeds, key=speeds.__getitem__)
        known = [
            record.add("tuned", {"setting": setting.name, "num_assistant_tokens": best, "tokens_per_second": speeds})
        ]
    return replace(setting, num_assistant_tokens=known[-1]["num_assistant_tokens"])


def _table(rows_: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "setting", "tokens/s", "quartiles", "over plain", "paired, 95 %", "per pass", "acceptance", "deviation"
    )
    for row in rows_:
        table.add_row(
            Text(row["setting"]),
            f"{row['tokens_per_second']:.2f}",
            "{:.2f} to {:.2f}".format(*row["quartiles"]),
            "-" if row["speedup_over_plain"] is None else f"{row['speedup_over_plain']:.2f}",
            "too few" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"]),
            f"{row['tokens_per_target_pass']:.2f}",
            " ".join(f"{share:.2f}" for share in row["acceptance"]) or "-",
            "-" if row["deviation"] is None else f"{row['deviation']:.3f}",
        )
    table.caption = (
        "over plain: mean tokens/s over that of plain decoding; paired: interval of the median ratio of answers to the "
        "same prompt; per pass: tokens per pass of the target"
    )
    return table
