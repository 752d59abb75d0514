"""Does `tune` find more than luck? Random settings under the same wall time, then both winners side by side.

    python benchmarks/tune_vs_random.py --prompts FILE --record NAME [options of tune]

Thirty settings are drawn from the very space that `tune` searches and run for real on the same prompts; the fastest one
within the deviation limit is the rival. Then `tune` runs; it is told nothing of them. Both winners and plain decoding
answer all prompts again, in turns, and the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import optuna

from pyramidsd.cli import main
from pyramidsd.config import PyramidConfig
from pyramidsd.tools import tune
from pyramidsd.tools.contest import Contest, Setting, pending
from pyramidsd.tools.options import configured
from pyramidsd.tools.prompts import prompt_facts, prompts_from
from pyramidsd.tools.records import Record
from pyramidsd.tools.summary import rows

RANDOM_SETTINGS = 30


def random_settings(base: PyramidConfig, seed: int) -> list[Setting]:
    """Distinct settings drawn uniformly from the space of `tune`."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    space, found = tune.Space(base), {}
    while len(found) < RANDOM_SETTINGS:
        config = space.sample(study.ask())
        found.setdefault(Setting(config.method, config).name, Setting(config.method, config))
    return list(found.values())


def answer_all(contest, settings, prompts, args, record, rounds):
    for setting, i, round_ in pending(settings, prompts, rounds, record):
        line = contest.reply(setting, prompts[i], args.max_new_tokens, args.seed).line()
        record.add("answer", {"setting": setting.name, "prompt": prompts[i].id, "round": round_, **line})


def fastest(settings, record, limit):
    """The setting with the most tokens per second among those within the limit, and its row."""
    table = rows([setting.line() for setting in settings], record.of_kind("answer"))
    best = max((row for row in table if row["deviation"] <= limit), key=lambda row: row["mean_tokens_per_second"])
    return next(setting for setting in settings if setting.name == best["setting"]), best


def run() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    tune.add_arguments(parser)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    tune.check(args)
    base = configured(args)
    prompts = prompts_from(args)
    plain, rivals = Setting.of("plain", base), random_settings(base, args.seed)
    contest = Contest([plain, *rivals])
    contest.reply(rivals[0], prompts[0], 4)  # warms up
    what = {"prompts": prompt_facts(args, prompts), "max_new_tokens": args.max_new_tokens, "models": list(base.models)}

    begun = time.perf_counter()
    record = Record(args.record.with_suffix(".random.jsonl"), {"verb": "random", **what})
    answer_all(contest, rivals, prompts, args, record, 1)
    random_seconds = time.perf_counter() - begun
    rival, _ = fastest(rivals, record, args.max_deviation)

    begun = time.perf_counter()
    words = ["tune", "--prompts", *map(str, args.prompts), "--study", str(args.record.with_suffix(".tune"))]
    words += ["--out", str(args.record.with_suffix(".toml")), "--max-new-tokens", str(args.max_new_tokens)]
    words += ["--max-deviation", str(args.max_deviation), "--trials", str(args.trials), "--json"]
    words += ["--limit", str(args.limit)] if args.limit else []
    words += ["--config", str(args.config)] if args.config else []
    if main(words):
        raise SystemExit("tune failed")
    tune_seconds = time.perf_counter() - begun
    config = PyramidConfig.load(args.record.with_suffix(".toml"))
    tuned = Setting.of(config.method, config)

    final = list({setting.name: setting for setting in (plain, rival, tuned)}.values())
    for setting in final:
        contest.enter(setting)
    what["settings"] = [setting.line() for setting in final]
    record = Record(args.record.with_suffix(".final.jsonl"), {"verb": "final", **what})
    answer_all(contest, final, prompts, args, record, 3)
    table = rows([setting.line() for setting in final], record.of_kind("answer"), baseline=rival.name)
    print(
        json.dumps(
            {
                "random": rival.name,
                "random_seconds": random_seconds,
                "tuned": tuned.name,
                "tune_seconds": tune_seconds,
                "rows": table,
            }
        )
    )


if __name__ == "__main__":
    run()
