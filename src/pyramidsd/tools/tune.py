"""Find the fastest pyramid for your prompts at a quality you choose: levels, rule, windows and thresholds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import tomli_w
from rich.text import Text

from pyramidsd.accept import DIVERGENCES, Fuzzy
from pyramidsd.config import METHODS, PyramidConfig
from pyramidsd.generate import check_limits, encode
from pyramidsd.models.base import Model
from pyramidsd.models.hf import quiet
from pyramidsd.tools.contest import Contest, Setting, pending
from pyramidsd.tools.expectation import Cost, Curve
from pyramidsd.tools.grading import check_code, graded
from pyramidsd.tools.options import add_pyramid_arguments, configured
from pyramidsd.tools.prompts import Prompt, add_prompt_arguments, prompt_facts, prompts_from
from pyramidsd.tools.proportions import Pairs
from pyramidsd.tools.records import Record
from pyramidsd.tools.summary import rows
from pyramidsd.tools.tasks import TASKS, Question, question
from pyramidsd.tools.terminal import busy, out
from pyramidsd.tools.traces import Trace, calibrate, replay, trace
from pyramidsd.types import UsageError

LARGEST_WINDOW = 24
PAIR_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""The windows at which the best exact pair is looked for."""

OPEN_THRESHOLD = 8.0
"""The largest threshold tried of a divergence that has no bound, in its own unit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    add_prompt_arguments(parser)
    parser.add_argument(
        "--max-deviation", type=float, metavar="D", help="mean, 0 to 1; default 0.05, or none with --max-drop"
    )
    parser.add_argument("--task", choices=TASKS, metavar="NAME", help=f"grade answers as {', '.join(TASKS)}")
    parser.add_argument(
        "--max-drop", type=points, metavar="P", help="points below plain decoding, such as 1pt; needs --task"
    )
    parser.add_argument(
        "--run-generated-code", action="store_true", help="grade programs by running them; see evaluate"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--trials", type=int, default=200, metavar="N", help="settings replayed on traces; default 200")
    parser.add_argument("--finalists", type=int, default=5, metavar="N", help="settings run for real; default 5")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often each answers; default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--study", type=Path, default=Path("tune"), metavar="NAME", help="NAME.sqlite and NAME.jsonl keep the work"
    )
    parser.add_argument("--out", type=Path, default=Path("pyramid.toml"), metavar="FILE", help="default pyramid.toml")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_pyramid_arguments(parser)


def points(text: str) -> float:
    """A number of percentage points, `1` or `1pt`."""
    return float(text.removesuffix("pt"))


def run(args: argparse.Namespace) -> int:
    """Trace, search, confirm, and write down the winner."""
    quiet()
    check(args)
    base = configured(args)
    if len(base.models) < 2:
        raise UsageError("there is nothing to tune with one model; name a --draft, such as prompt-lookup")
    prompts = prompts_from(args)
    questions = [question(prompt, args.task) for prompt in prompts] if args.task else [Question(p) for p in prompts]
    check_code(questions, args.run_generated_code)
    plain = Setting.of("plain", base)
    with busy("Loading models"):
        contest = Contest([plain, _of_all(base)])
    record = Record(args.study.with_suffix(".jsonl"), _identity(args, base, prompts))
    _answer(contest, [plain], questions, args, record)
    replays = Replays(contest, base, prompts, record)
    finalists = _search(replays, args, base)
    _answer(contest, [plain, *finalists], questions, args, record)
    report = _verdict([plain, *finalists], record, args)
    _write(report["config"], args.out)
    if args.json:
        print(json.dumps(report))  # noqa: T201
    else:
        out.print(Text(report["verdict"]))
        out.print(f"Written to {args.out}.")
    return 0


def _of_all(base: PyramidConfig) -> Setting:
    """A setting that uses every model."""
    return Setting.of("nested" if len(base.models) > 2 else "sd", base)


def check(args: argparse.Namespace) -> None:
    """Fill in the limit that was not given.

    Raises:
        UsageError: an option is out of range, or lacks another one.
    """
    check_limits(args.max_new_tokens, ())
    if (args.task is None) != (args.max_drop is None):
        raise UsageError("--task and --max-drop belong together: the task says how answers are graded")
    if args.max_deviation is None:
        args.max_deviation = 0.05 if args.task is None else 1.0
    if not 0 <= args.max_deviation <= 1:
        raise UsageError(f"max_deviation must lie in [0, 1], got {args.max_deviation}; 0 asks for exact settings")
    for name in ("trials", "finalists", "rounds"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(args, name)}")
    if not args.out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {args.out}: there is no such folder; choose another --out")


def _identity(args: argparse.Namespace, base: PyramidConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "verb": "tune",
        "prompts": prompt_facts(args, prompts),
        "max_new_tokens": args.max_new_tokens,
        "max_deviation": args.max_deviation,
        "task": args.task,
        "seed": args.seed,
        "models": list(base.models),
        "sampling": Setting.of("plain", base).line()["sampling"],
        "divergence": base.divergence,
        "dtype": base.dtype,
        "device": base.device,
    }


def _answer(
    contest: Contest,
    settings: Sequence[Setting],
    questions: Sequence[Question],
    args: argparse.Namespace,
    record: Record,
) -> None:
    """Run settings for real, in turns, and grade them; what the record has already is not run again."""
    jobs = pending(settings, [asked.prompt for asked in questions], args.rounds, record)
    for setting in dict.fromkeys(setting for setting, _, _ in jobs):
        contest.enter(setting)
        contest.reply(setting, questions[0].prompt, 1, args.seed)  # warms up
    with busy("Running " + ("plain decoding" if len(settings) == 1 else "the finalists"), len(jobs)) as advance:
        for setting, i, round_ in jobs:
            asked = questions[i]
            reply = contest.reply(setting, asked.prompt, args.max_new_tokens, args.seed + round_)
            which = {"setting": setting.name, "prompt": asked.prompt.id, "round": round_}
            record.add("answer", which | reply.line() | graded(asked, reply.texts[-1]))
            advance(1)


class Replays:
    """Every setting on the traces of all prompts.

    The traces are made again from the recorded answers when a run is taken up: one forward per model and prompt.
    """

    def __init__(self, contest: Contest, base: PyramidConfig, prompts: Sequence[Prompt], record: Record) -> None:
        everything = contest.models(_of_all(base))
        models = {name: model for name, model in zip(base.models, everything, strict=True) if isinstance(model, Model)}
        answers = {line["prompt"]: line for line in record.of_kind("answer") if line["setting"] == "plain"}
        self.costs = _costs(models, contest, prompts, answers, record)
        self.traces: list[Trace] = []
        with busy("Tracing", len(prompts)) as advance:
            for prompt in prompts:
                context, answer = contest.first_turn(prompt, answers[prompt.id])
                self.traces.append(trace(models, contest.target, context, answer))
                advance(1)

    def __len__(self) -> int:
        return len(self.traces)

    def __call__(self, config: PyramidConfig, i: int) -> tuple[float, float]:
        """Expected tokens per second and mean deviation of a pyramid on the i-th prompt."""
        done = replay(config, self.traces[i], self.costs)
        return done.tokens / done.seconds, done.deviation / done.tokens


def _costs(
    models: Mapping[str, Model],
    contest: Contest,
    prompts: Sequence[Prompt],
    answers: Mapping[str, Mapping[str, Any]],
    record: Record,
) -> dict[str, Cost]:
    """What a forward of each model costs, from the record where it was measured before."""
    known = {line["model"]: Curve((*line["widths"],), (*line["seconds"],)) for line in record.of_kind("curve")}
    context = (
        encode(contest.target.tokenizer, contest.request(prompts[0].messages)) + answers[prompts[0].id]["token_ids"]
    )
    with busy("Timing forwards", len(models)) as advance:
        for name, model in models.items():
            if name not in known:
                known[name] = calibrate(model, context)
                record.add("curve", {"model": name, **asdict(known[name])})
            advance(1)
    return dict(known)


# The search


@dataclass(frozen=True, slots=True)
class Space:
    """All pyramids that can be made of some models: which of them, which method, windows and thresholds."""

    base: PyramidConfig

    def chains(self) -> dict[str, tuple[str, ...]]:
        """Every choice of lower models, by name."""
        *lower, target = self.base.models
        chosen = [c for size in range(1, len(lower) + 1) for c in combinations(lower, size)]
        return {"+".join(chain): (*chain, target) for chain in chosen}

    def sample(self, trial: optuna.trial.BaseTrial) -> PyramidConfig:
        """The pyramid that a trial chooses."""
        chains = self.chains()
        models = chains[trial.suggest_categorical("lower models", list(chains))]
        boundaries = len(models) - 1
        methods = [name for name, method in METHODS.items() if method.num_levels == min(boundaries + 1, 3)]
        method = trial.suggest_categorical(f"method over {boundaries}", methods)
        windows = tuple(trial.suggest_int(f"window {i}", 1, LARGEST_WINDOW, log=True) for i in range(boundaries))
        config = replace(
            self.base, method=method, models=models, num_draft_tokens=windows, thresholds=(0.0,) * boundaries
        )
        largest = min(DIVERGENCES[config.divergence].largest, OPEN_THRESHOLD)
        fuzzy = [isinstance(rule, Fuzzy) for rule in config.rules()]
        thresholds = [
            trial.suggest_float(f"threshold {i}", 0.0, largest) if is_ else 0.0 for i, is_ in enumerate(fuzzy)
        ]
        return replace(config, thresholds=tuple(round(value, 3) for value in thresholds))


LIMITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Where only the task counts, the fastest settings within each of these deviations are tried on it."""


def _search(replays: Replays, args: argparse.Namespace, base: PyramidConfig) -> list[Setting]:
    """The settings worth running: the best exact pair, and the fastest ones on the traces within each limit."""
    space = Space(base)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    limits = [args.max_deviation] if args.task is None else [limit for limit in LIMITS if limit <= args.max_deviation]
    trials, finalists = -(-args.trials // len(limits)), -(-args.finalists // len(limits))
    pair = _best_pair(space, replays)
    best = {Setting(pair.method, pair).name: Setting(pair.method, pair)}
    with busy("Searching on traces", trials * len(limits)) as advance:
        for limit in limits:
            study = _study(args, limit)
            finished = len(study.get_trials(deepcopy=False, states=_FINISHED))
            advance(finished)
            for _ in range(finished, trials):
                _explore(study, partial(_objective, space=space, replays=replays, limit=limit), args)
                advance(1)
            best |= {setting.name: setting for setting in _fastest(study, space, limit)[:finalists]}
    return list(best.values())


_FINISHED = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)


def _explore(study: optuna.Study, objective: Callable[[optuna.trial.Trial], float], args: argparse.Namespace) -> None:
    try:
        study.optimize(objective, n_trials=1)
    except optuna.exceptions.StorageInternalError as error:
        path = args.study.with_suffix(".sqlite")
        raise UsageError(
            f"cannot write {path}; make room, then run the same command again: its trials are kept"
        ) from error


def _fastest(study: optuna.Study, space: Space, limit: float) -> list[Setting]:
    """The settings of a study within its limit, fastest first, each once."""
    complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    fitting = [trial for trial in complete if trial.user_attrs["deviation"] <= limit]
    ranked = sorted(fitting, key=lambda trial: trial.value or 0.0, reverse=True)
    configs = [space.sample(optuna.trial.FixedTrial(trial.params)) for trial in ranked]
    return list({Setting(c.method, c).name: Setting(c.method, c) for c in configs}.values())


def _best_pair(space: Space, replays: Replays) -> PyramidConfig:
    """The fastest exact chain of two on the traces: what a pyramid has to beat."""
    pairs = [
        replace(space.base, method="sd", models=models, num_draft_tokens=(window,), thresholds=(0.0,))
        for models in space.chains().values()
        if len(models) == 2
        for window in PAIR_WINDOWS
    ]
    return max(pairs, key=lambda config: fmean(replays(config, i)[0] for i in range(len(replays))))


def _study(args: argparse.Namespace, limit: float) -> optuna.Study:
    path = args.study.with_suffix(".sqlite")
    try:
        return optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name=f"deviation {limit:g}",
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=args.seed, n_startup_trials=40),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=20, n_warmup_steps=0),
        )
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot use {path}: {reason}; remove it or choose another --study") from error


def _objective(trial: optuna.trial.Trial, space: Space, replays: Replays, limit: float) -> float:
    config = space.sample(trial)
    speeds: list[float] = []
    deviations: list[float] = []
    for i in range(len(replays)):
        speed, deviation = replays(config, i)
        speeds.append(speed)
        deviations.append(deviation)
        trial.report(_score(speeds, deviations, limit), i)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("deviation", fmean(deviations))
    return _score(speeds, deviations, limit)


def _score(speeds: Sequence[float], deviations: Sequence[float], limit: float) -> float:
    """Speed within the budget; past it, less the further out, so that the search finds back."""
    excess = fmean(deviations) - limit
    return fmean(speeds) * (1.0 if excess <= 0 else 0.5 / (1 + 20 * excess))


# The verdict


def _verdict(settings: Sequence[Setting], record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, who wins, and what that gains; plain decoding and `sd` can win too."""
    lines = [setting.line() for setting in settings]
    answers = record.of_kind("answer")
    table = [row | _drop(row["setting"], answers) for row in rows(lines, answers)]
    fitting = [row for row in table if row["deviation"] <= args.max_deviation]
    if args.task is not None:
        fitting = [row for row in fitting if row["drop_from_plain"] <= args.max_drop]
    speeds = {row["setting"]: row["mean_tokens_per_second"] for row in table}
    best = max(fitting, key=lambda row: speeds[row["setting"]])
    config = next(setting.config for setting in settings if setting.name == best["setting"])
    over_sd = speeds[best["setting"]] / max(row["mean_tokens_per_second"] for row in table if row["method"] == "sd")
    gains = f"{best['speedup_over_plain']:.2f} times plain decoding, {over_sd:.2f} times the best sd"
    if best["method"] == "plain":
        verdict = f"Plain decoding is fastest here ({over_sd:.2f} times the best sd): no pyramid is recommended."
    elif best["method"] == "sd":
        verdict = f"{best['setting']} is fastest here ({gains}): no pyramid is recommended."
    else:
        verdict = f"{best['setting']}: {gains}, at a mean deviation of {best['deviation']:.3f}."
    if args.task is not None:
        low, high = best["drop_interval"]
        drop = f"{best['drop_from_plain']:.1f} points below plain decoding on {args.task}"
        verdict += f" {drop} (95 %: {low:.1f} to {high:.1f})."
    if best["method"] != "plain" and best["interval"] is None:
        verdict += " Too few answers to be sure; give more prompts or rounds."
    return {"rows": table, "verdict": verdict, "best": best["setting"], "config": asdict(config)}


def _drop(setting: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percentage points below plain decoding on the same prompts and seeds, where answers were graded."""
    graded_ = [line for line in answers if line["correct"] is not None]
    of_plain = {(line["prompt"], line["round"]): line["correct"] for line in graded_ if line["setting"] == "plain"}
    pairs = [
        (of_plain[line["prompt"], line["round"]], line["correct"]) for line in graded_ if line["setting"] == setting
    ]
    if not pairs:
        return {}
    counts = Pairs.of(pairs)
    return {"drop_from_plain": 100 * counts.difference, "drop_interval": [100 * bound for bound in counts.interval()]}


def _write(config: Mapping[str, Any], out_path: Path) -> None:
    """The TOML form of a pyramid."""
    table = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    table["sampling"] = {key: value for key, value in config["sampling"].items() if key != "processors"}
    try:
        out_path.write_text(tomli_w.dumps(table), "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out_path}: {error.strerror}; choose another --out, and run again") from error
