"""Tuning: replays are what the engine does, the search finds what a full grid finds, and nothing is lost."""

import itertools
import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from pyramidsd.accept import DIVERGENCES
from pyramidsd.cli import main
from pyramidsd.config import PyramidConfig
from pyramidsd.generate import encode
from pyramidsd.tools.contest import Contest, Setting
from pyramidsd.tools.prompts import Prompt
from pyramidsd.tools.records import read_record
from pyramidsd.tools.traces import replay, trace
from test_cli import refusal, save

optuna = pytest.importorskip("optuna")
from pyramidsd.tools import tune  # noqa: E402  needs optuna


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("models") / "target"))


def base(model, **changes):
    return PyramidConfig("nested", ("prompt-lookup", "layers:2", model), (3, 4), (0.1, 0.1), **changes)


TEXTS = ["abcabcabc", "the cat and the hat", "z"]
FREE = {"layers:2": lambda width: 0.0}


def as_prompt(text):
    return Prompt("1", "text", ({"role": "user", "content": text},))


def traced(model, text, tokens=40):
    """A contest over the three models, the prompt, and the trace of plain decoding's answer."""
    config = base(model)
    plain = Setting.of("plain", config)
    contest = Contest([plain, Setting.of("nested", config)])
    prompt = as_prompt(text)
    answer = contest.reply(plain, prompt, tokens).line()["token_ids"]
    models = dict(zip(config.models[1:], contest.models(Setting.of("nested", config))[1:], strict=True))
    context = encode(contest.target.tokenizer, text)
    return contest, prompt, trace(models, contest.target, context, answer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "sd", "num_draft_tokens": (1, 4)},
        {"method": "sd", "num_draft_tokens": (7, 4)},
        {"method": "fsd", "thresholds": (0.1, 0.0)},
        {"method": "nested", "num_draft_tokens": (2, 1)},
    ],
    ids=str,
)
def test_a_replay_of_an_exact_greedy_method_has_the_rounds_of_the_engine(text, changes, model):
    """With a window of one at the top no draft goes on after it has left the answer, so every counter must agree."""
    contest, prompt, recorded = traced(model, text)
    config = replace(base(model), **changes)
    setting = Setting.of(config.method, config)
    contest.enter(setting)
    live = contest.reply(setting, prompt, 40)
    widths = {}

    def cost(width):
        widths[width] = widths.get(width, 0) + 1
        return 1.0

    done = replay(config, recorded, {**FREE, model: cost})
    assert done.tokens == 40
    assert done.stats == live.stats
    assert done.deviation == sum(live.line()["deviation"]) == 0
    assert sorted(widths.items()) == [(width, count) for width, count, _ in live.line()["passes"][-1]]


def test_a_trace_keeps_what_matters_of_a_row(model):
    """Its head is that of the whole row, its tail is spread, so a divergence can only shrink, and by little."""
    contest, prompt, recorded = traced(model, "abcabc")
    config = base(model)
    lower, target = contest.models(Setting.of("nested", config))[1:]
    answer = contest.reply(Setting.of("plain", config), prompt, 40).line()["token_ids"]
    context = encode(contest.target.tokenizer, "abcabc") + answer[:-1]
    full = [net.logits(context, 40).log_softmax(-1) for net in (lower, target)]
    small = list(recorded.rows.values())
    for whole, kept, entropy in zip(full, small, recorded.entropy.values(), strict=True):
        assert kept.exp().sum(-1).tolist() == pytest.approx([1.0] * 40, rel=1e-5)
        assert torch.allclose(whole.topk(32).values, kept.topk(32).values, atol=1e-5)
        assert entropy == pytest.approx((-(whole.exp() * whole).sum(-1)).tolist(), abs=1e-4)
    js = DIVERGENCES["js"].measure
    lost = js(*full) - js(*small)
    assert lost.min() > -1e-6
    assert lost.mean() < 0.01


def test_the_search_finds_what_a_full_grid_finds(model, tmp_path):
    """Over all pairs of windows and a grid of thresholds of every method, on the same traces and costs."""
    config = base(model)
    traces = [traced(model, text, 20)[2] for text in TEXTS[:2]]
    costs = {"layers:2": lambda width: 2.0 + 0.1 * width, model: lambda width: 20.0 + 0.2 * width}

    def replays(config, i):
        done = replay(config, traces[i], costs)
        return done.tokens / done.seconds, done.deviation / done.tokens

    search = type("Replays", (), {"__len__": lambda self: 2, "__call__": lambda self, config, i: replays(config, i)})()

    def score(config):
        found = [replays(config, i) for i in range(2)]
        return tune._score([speed for speed, _ in found], [deviation for _, deviation in found], 0.1)

    pairs = [
        replace(config, method="sd", models=("prompt-lookup", model), num_draft_tokens=(k,), thresholds=(0.0,))
        for k in (1, 2, 4, 8)
    ]
    pairs += [replace(pair, models=("layers:2", model)) for pair in pairs]
    towers = [
        replace(config, method=method, num_draft_tokens=windows, thresholds=taus)
        for method in ("nested", "psd", "psd-a")
        for windows in itertools.product([1, 3, 8], repeat=2)
        for taus in itertools.product([0.1, 0.4], repeat=2)
    ]
    best = max(map(score, pairs + towers))
    args = tune_arguments(tmp_path, "--trials", "150", "--max-deviation", "0.1")
    finalists = tune._search(search, args, config)
    assert max(score(setting.config) for setting in finalists) >= 0.97 * best


def tune_arguments(tmp_path, *more):
    import argparse

    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(["--prompts", "x", "--study", str(tmp_path / "study"), *more])


@pytest.fixture
def arguments(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS[:2]))
    return [
        *("--target", model, "--qualifier", "layers:2", "--prompts", str(prompts), "--trials", "15"),
        *("--study", str(tmp_path / "study"), "--out", str(tmp_path / "pyramid.toml"), "--max-new-tokens", "16"),
    ]


def test_the_winner_is_written_down_and_runs(arguments, tmp_path, capsys):
    assert main(["tune", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    fitting = [row for row in report["rows"] if row["deviation"] <= 0.05]
    best = max(fitting, key=lambda row: row["mean_tokens_per_second"])
    assert report["best"] == best["setting"]
    assert {row["method"] for row in report["rows"]} >= {"plain", "sd"}
    written = PyramidConfig.load(tmp_path / "pyramid.toml")
    assert Setting.of(written.method, written).name == best["setting"]
    if best["method"] in ("plain", "sd"):
        assert "no pyramid is recommended" in report["verdict"]
    assert main(["generate", "abc", "--config", str(tmp_path / "pyramid.toml"), "--max-new-tokens", "5"]) == 0


def test_killed_in_the_middle_nothing_is_lost(arguments, tmp_path, capsys):
    command = [sys.executable, "-m", "pyramidsd", "tune", *arguments, "--json"]
    record, study = tmp_path / "study.jsonl", tmp_path / "study.sqlite"

    def trials():
        if not study.exists():
            return 0
        try:
            with closing(sqlite3.connect(study)) as database:
                return database.execute("select count(*) from trials").fetchone()[0]
        except sqlite3.OperationalError:  # it is being made
            return 0

    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while trials() < 3:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = [line for line in read_record(record) if line["kind"] in ("answer", "curve")]
    before = trials()
    assert len(kept) >= 4
    assert before > 0
    assert main(["tune", *arguments, "--json"]) == 0
    lines = [line for line in read_record(record) if line["kind"] in ("answer", "curve")]
    assert lines[: len(kept)] == kept
    answers = [(line["setting"], line["prompt"]) for line in lines if line["kind"] == "answer"]
    assert len(set(answers)) == len(answers)
    finished = [
        t
        for t in optuna.load_study(study_name="deviation 0.05", storage=f"sqlite:///{study}").trials
        if t.state.is_finished()
    ]
    assert len(finished) == 15


def test_the_quality_can_be_that_of_a_task(arguments, model, tmp_path, capsys):
    """Half of the answers of plain decoding are right by construction, so the drop is counted against known ones."""
    contest, _, _ = traced(model, TEXTS[0])
    said = [contest.reply(Setting.of("plain", base(model)), as_prompt(text), 16).texts[0] for text in TEXTS[:2]]
    lines = [{"prompt": TEXTS[0], "expected": said[0]}, {"prompt": TEXTS[1], "expected": "something else"}]
    prompts = tmp_path / "graded.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    graded = [*arguments, "--prompts", str(prompts), "--task", "text", "--max-drop", "1pt", "--json"]
    assert main(["tune", *graded]) == 0
    report = json.loads(capsys.readouterr().out)
    answers = [line for line in read_record(tmp_path / "study.jsonl") if line["kind"] == "answer"]
    assert [line["correct"] for line in answers if line["setting"] == "plain"] == [True, False]
    for row in report["rows"]:
        own = [line["correct"] for line in answers if line["setting"] == row["setting"]]
        assert row["drop_from_plain"] == pytest.approx(100 * (1 - sum(own)) / 2)
    assert "points below plain decoding on text" in report["verdict"]
    best = next(row for row in report["rows"] if row["setting"] == report["best"])
    assert best["drop_from_plain"] <= 1


BAD = {
    "a task without a limit": (["--task", "text"], "--task and --max-drop belong together"),
    "a limit without a task": (["--max-drop", "1pt"], "--task and --max-drop belong together"),
    "a limit that is no number": (["--task", "text", "--max-drop", "little"], "--max-drop"),
    "a task without answers": (
        ["--task", "text", "--max-drop", "1"],
        "cannot be graded as text: it has no expected or answer",
    ),
    "no deviation": (["--max-deviation", "2"], "max_deviation must lie in [0, 1]"),
    "no trials": (["--trials", "0"], "trials must be at least 1"),
    "no finalists": (["--finalists", "0"], "finalists must be at least 1"),
    "a file that cannot be written": (["--out", "nowhere/pyramid.toml"], "choose another --out"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, arguments, capsys):
    more, cure = BAD[case]
    assert cure in refusal(capsys, "tune", *arguments, *more)


def test_a_study_of_other_settings_is_refused(arguments, capsys):
    assert main(["tune", *arguments, "--json"]) == 0
    capsys.readouterr()
    assert "other settings (max_deviation)" in refusal(capsys, "tune", *arguments, "--max-deviation", "0.2")


def test_a_damaged_study(arguments, tmp_path, capsys):
    (tmp_path / "study.sqlite").write_text("no database" * 100)
    assert "remove it or choose another --study" in refusal(capsys, "tune", *arguments)
