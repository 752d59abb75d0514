"""Measuring: prompts are read, runs are taken up, baselines are what they say, and statistics find what is there."""

import argparse
import json
import math
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import binom

from pyramidsd.cli import main
from pyramidsd.config import PyramidConfig
from pyramidsd.tools.contest import PEER_WINDOWS, Contest, Setting
from pyramidsd.tools.prompts import prompts_from, read_prompts
from pyramidsd.tools.records import Record, read_record
from pyramidsd.tools.summary import median_interval, quartiles, rows
from pyramidsd.types import UsageError
from test_cli import refusal, save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abcabcab"}\n{"turns": ["the cat", "the hat"]}\n{"prompt": "xyzxyzxy"}\n')
    return str(path)


# Prompts

LINES = {
    "text": ('{"prompt": "Why?", "id": "q7"}', "text", "q7", "Why?"),
    "chat": ('{"messages": [{"role": "user", "content": "Hi"}]}', "chat", "1", "Hi"),
    "spec-bench": ('{"question_id": 81, "category": "writing", "turns": ["One", "Two"]}', "spec-bench", "81", "One"),
    "humaneval": (
        '{"task_id": "HumanEval/0", "prompt": "def f():\\n", "entry_point": "f", "test": "..."}',
        "humaneval",
        "HumanEval/0",
        "def f():",
    ),
    "gsm8k": ('{"question": "2 + 2?", "answer": "4\\n#### 4"}', "gsm8k", "1", "2 + 2?"),
    "math": ('{"id": "g", "prompt": "2 + 3?", "expected": "5", "upstream_answer": "5"}', "math", "g", "2 + 3?"),
    "choice": ('{"question": "Sky?", "choices": ["red", "blue"], "answer": "B"}', "choice", "1", "B. blue"),
}


@pytest.mark.parametrize("name", LINES)
def test_every_format_is_read(name, tmp_path):
    line, task, prompt_id, said = LINES[name]
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n\n")
    (prompt,) = read_prompts(path)
    assert (prompt.task, prompt.id) == (task, prompt_id)
    assert said in prompt.messages[0]["content"]
    assert prompt.followups == (("Two",) if name == "spec-bench" else ())


def test_plain_text_has_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second {not json\n")
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in read_prompts(path)] == [
        ("1", "first"),
        ("3", "  second {not json"),
    ]


BAD_LINES = {
    "not JSON": ("{prompt: 1}", "line 2 is not JSON"),
    "no object": ("[1]", "line 2 is in no known format"),
    "unknown keys": ('{"text": "a"}', 'line 2 is in no known format; give {"prompt"'),
    "prompt is no text": ('{"prompt": 3}', "line 2: prompt must be text, got 3"),
    "empty prompt": ('{"prompt": " "}', "line 2: prompt must be text"),
    "no turns": ('{"turns": []}', "line 2: turns must be a list of texts"),
    "turn is no text": ('{"turns": ["a", 2]}', "line 2: turns must be a list of texts"),
    "no messages": ('{"messages": []}', "line 2: messages must be a list of objects"),
    "message without a role": ('{"messages": [{"content": "a"}]}', "line 2: messages must be"),
    "choices without a question": ('{"choices": ["a"], "answer": "A"}', "line 2: a multiple-choice line needs"),
    "an id twice": ('{"prompt": "b", "id": "1"}', "uses an id twice"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(case, tmp_path, model, capsys):
    line, cure = BAD_LINES[case]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    assert cure in refusal(capsys, "bench", "--target", model, "--prompts", str(path))


def test_bad_prompt_files(tmp_path, model, capsys):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path, cure in {
        tmp_path / "none.jsonl": "check the path",
        latin: "is not UTF-8",
        empty: "holds no prompts",
    }.items():
        assert cure in refusal(capsys, "bench", "--target", model, "--prompts", str(path))


def test_a_limit_spreads_over_the_file_and_files_take_turns(tmp_path):
    for name in "ab":
        lines = [json.dumps({"prompt": f"{name}{i}", "id": f"{name}{i}"}) for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    asked = argparse.Namespace(prompts=[tmp_path / "a.jsonl", tmp_path / "b.jsonl"], limit=3)
    assert [prompt.id for prompt in prompts_from(asked)] == ["a0", "b0", "a3", "b3", "a6", "b6"]


# Records


def test_a_half_written_line_is_dropped_and_the_run_taken_up(tmp_path):
    path = tmp_path / "record.jsonl"
    Record(path, {"verb": "bench"}).add("answer", {"n": 1})
    with path.open("a") as file:
        file.write('{"kind":"answer","n":2')
    assert [line["kind"] for line in read_record(path)] == ["run", "answer"]
    again = Record(path, {"verb": "bench"})
    again.add("answer", {"n": 3})
    assert [line.get("n") for line in read_record(path)] == [None, 1, None, 3]


def test_a_damaged_record_is_refused_by_line(tmp_path):
    path = tmp_path / "record.jsonl"
    Record(path, {"verb": "bench"}).add("answer", {"n": 1})
    whole = path.read_text()
    for damaged, cure in {
        whole.replace('"n":1', '"n":'): "line 2 is no record",
        "\n" + whole: "line 1 is no record",
        whole.replace('"format":1', '"format":9'): "format 1",
        "[1]\n": "line 1 is no record",
    }.items():
        path.write_text(damaged)
        with pytest.raises(UsageError, match=cure):
            read_record(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="line 1 is no record"):
        read_record(path)


def test_a_record_of_another_run_is_refused(tmp_path):
    Record(tmp_path / "record.jsonl", {"verb": "bench", "seed": 0})
    with pytest.raises(UsageError, match=r"other settings \(seed\)"):
        Record(tmp_path / "record.jsonl", {"verb": "bench", "seed": 1})


def test_a_full_disk_keeps_what_was_measured(tmp_path, model, prompts):
    """A limit on the size of files stands for the disk: the same errors, and no need to be root."""
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "pyramidsd", "bench", "--methods", "plain,sd", "--target", model]
    command += ["--prompts", prompts, "--max-new-tokens", "9", "--rounds", "2", "--record", str(record), "--json"]

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    full = subprocess.run(command, capture_output=True, text=True, preexec_fn=little_room, check=False)
    assert full.returncode == 2
    assert full.stderr.count("\n") == 1
    assert "make room or choose another file" in full.stderr
    kept = [line for line in read_record(record) if line["kind"] == "answer"]
    assert 0 < len(kept) < 12
    subprocess.run(command, capture_output=True, check=True)
    answers = [line for line in read_record(record) if line["kind"] == "answer"]
    assert answers[: len(kept)] == kept
    assert len(answers) == len({(a["setting"], a["prompt"], a["round"]) for a in answers}) == 12


# The verb


def bench(capsys, *arguments) -> list[dict]:
    assert main(["bench", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


ALL = "plain,sd,fsd,psd-a,psd-f,psd,nested,hf-plain,hf-assisted,hf-prompt-lookup"


def test_all_methods_and_baselines_on_one_clock(model, prompts, tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    arguments = ["--methods", ALL, "--target", model, "--qualifier", "layers:2", "--prompts", prompts]
    arguments += ["--max-new-tokens", "12", "--rounds", "2", "--record", str(record)]
    table = bench(capsys, *arguments)
    assert [row["method"] for row in table] == ALL.split(",")
    answers = [line for line in read_record(record) if line["kind"] == "answer"]
    for row in table:
        own = [answer for answer in answers if answer["setting"] == row["setting"]]
        passes = sum(count for answer in own for _, count, _ in answer["passes"][-1])
        assert row["answers"] == len(own) == 6
        assert row["tokens"] == 2 * (12 + 24 + 12)
        assert row["tokens_per_target_pass"] == pytest.approx(row["tokens"] / passes)
        assert 0 < sum(row["forward_share"]) < 1
        assert sum(row["forward_share"]) + row["overhead"] == pytest.approx(1)
    by_method = {row["method"]: row for row in table}
    for method in ("plain", "sd", "nested", "hf-plain", "hf-assisted", "hf-prompt-lookup"):
        assert by_method[method]["same_as_plain"] == 1, method  # greedy in float32: the very tokens
    for method in ("plain", "sd", "nested"):
        assert by_method[method]["worst_deviation"] == 0
    assert by_method["psd"]["deviation"] > 0
    assert by_method["plain"]["speedup_over_plain"] == by_method["plain"]["paired"] == 1
    # Again with everything in the record: nothing is measured anew.
    before = record.read_text().splitlines()
    assert bench(capsys, *arguments) == table
    assert [line for line in record.read_text().splitlines() if '"kind":"run"' not in line] == before[1:]


@pytest.mark.parametrize("window", PEER_WINDOWS)
def test_the_windows_of_the_baselines_are_really_set(model, window):
    """A draft equal to the target is always kept, so every pass of the target but the last is one wider."""
    config = PyramidConfig("sd", ("layers:3", model), (5,), (0.2,))
    assisted = Setting("hf-assisted", config, window)
    lookup = Setting("hf-prompt-lookup", PyramidConfig("plain", (model,)), window)
    contest = Contest([assisted, lookup])
    draft = contest.models(assisted)[0].model
    before = draft.generation_config
    draft.generation_config.assistant_confidence_threshold = 0.0  # of a random model; its default stops drafts early
    prompt = read_prompts_of("ab" * 8)
    widths = contest.reply(assisted, prompt, 44).line()["passes"][-1]
    assert any(width == window + 1 for width, _, _ in widths)
    assert max(width for width, count, _ in widths if count > 1 or width < 16) <= window + 1
    assert draft.generation_config is before
    widths = contest.reply(lookup, prompt, 44).line()["passes"][-1]
    assert max(width for width, _, _ in widths if width < 16 or width > 16 + window) <= window + 1


def read_prompts_of(text):
    from pyramidsd.tools.prompts import Prompt

    return Prompt("1", "text", ({"role": "user", "content": text},))


def test_every_answer_reads_its_prompt_from_an_empty_cache(model, prompts):
    setting = Setting.of("nested", PyramidConfig("nested", ("prompt-lookup", "layers:2", model), (3, 3), (0.1, 0.1)))
    contest = Contest([setting])
    prompt = read_prompts(Path(prompts))[0]
    first, again = (contest.reply(setting, prompt, 10).line() for _ in range(2))
    assert [[w[:2] for w in model_] for model_ in first["passes"]] == [[w[:2] for w in m] for m in again["passes"]]


def test_recipes_cross_their_lists_and_name_each_setting_once(model, prompts, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[run]]\nmethods = ["plain", "psd-a", "psd-f"]\ntau_q = [0.1, 0.2]\ntau_t = [0.3, 0.4]\n'
        f'[[run]]\nmethods = ["sd"]\nmodels = ["layers:2", "{model}"]\ndraft_tokens = [2, 5]\n'
    )
    arguments = ["--target", model, "--qualifier", "layers:2", "--prompts", prompts, "--max-new-tokens", "3"]
    table = bench(capsys, *arguments, "--recipe", str(recipe), "--rounds", "1", "--limit", "1", "--json")
    count = {method: sum(row["method"] == method for row in table) for method in ("plain", "psd-a", "psd-f", "sd")}
    assert count == {"plain": 1, "psd-a": 2, "psd-f": 4, "sd": 2}
    assert [row["num_draft_tokens"] for row in table if row["method"] == "sd"] == [[2], [5]]
    assert [row["models"] for row in table if row["method"] == "sd"] == [["layers:2", "target"]] * 2


BAD_RECIPES = {
    "not TOML": ("[[run", "is not TOML"),
    "no runs": ("x = 1", "must hold [[run]] tables"),
    "unknown key": ('[[run]]\nmethods = ["sd"]\nspeed = [1]', "run 1: unknown key 'speed'"),
    "no list": ("[[run]]\nmethods = 'sd'", "run 1: methods must be a list of str"),
    "wrong kind": ('[[run]]\nmethods = ["sd"]\ndraft_tokens = [1.5]', "draft_tokens must be a list of int"),
    "no methods": ("[[run]]\ntau_t = [0.1]", "run 1: methods are missing"),
    "unknown method": ('[[run]]\nmethods = ["warp"]', "unknown method 'warp'"),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_a_bad_recipe(case, model, prompts, tmp_path, capsys):
    text, cure = BAD_RECIPES[case]
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert cure in refusal(capsys, "bench", "--target", model, "--prompts", prompts, "--recipe", str(path))


BAD_OPTIONS = {
    "unknown method": (["--methods", "plain,warp"], "unknown method 'warp'; choose from plain"),
    "no draft for assisted": (["--methods", "hf-assisted"], "needs a draft model below the target"),
    "too few models": (["--methods", "psd"], "name a qualifier"),
    "no rounds": (["--rounds", "0"], "rounds must be at least 1"),
    "no prompts": (["--limit", "0"], "number of prompts must be at least 1"),
    "no tokens": (["--max-new-tokens", "0"], "at least 1"),
    "a record that is a folder": (["--record", "."], "Is a directory"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case, model, prompts, capsys):
    arguments, cure = BAD_OPTIONS[case]
    assert cure in refusal(capsys, "bench", "--target", model, "--prompts", prompts, *arguments)


# Statistics


@pytest.mark.parametrize("n", range(1, 60))
def test_the_interval_of_a_median_covers_it(n):
    """The number of values below the median is binomial, whatever their law, so the coverage is known."""
    found = median_interval([float(i) for i in range(n)])
    if found is None:
        assert 1 - 2 * binom.cdf(0, n, 0.5) < 0.95
        return
    low, high = map(int, found)
    assert low == n - 1 - high
    assert 1 - 2 * binom.cdf(low, n, 0.5) >= 0.95  # holds the median with the confidence that is stated,
    assert 1 - 2 * binom.cdf(low + 1, n, 0.5) < 0.95 or low + 1 >= n - 1 - low - 1  # and no narrower one does


def timings(seed, slower):
    """Synthetic answers: prompts of different difficulty, 5 % noise, and now and then a stall."""
    draw = random.Random(seed)
    lines = []
    for prompt in range(24):
        speed = draw.uniform(5, 15)
        for name, factor in (("plain", 1.0), ("other", 1 - slower)):
            noise = math.exp(draw.gauss(0, 0.05)) * (0.4 if draw.random() < 0.05 else 1)
            seconds = 100 / (speed * factor * noise)
            lines.append(
                {
                    "setting": name,
                    "prompt": prompt,
                    "round": 0,
                    "token_ids": [0] * 100,
                    "seconds": seconds,
                    "deviation": [0.0] * 100,
                    "passes": [[[1, 100, 0.9 * seconds]]],
                    "stats": [],
                }
            )
    return lines


SETTINGS = [
    {"name": name, "method": name, "models": ["m"], "num_draft_tokens": [], "thresholds": []}
    for name in ("plain", "other")
]


@pytest.mark.statistical
def test_a_planted_slow_down_of_a_tenth_is_found():
    found = [rows(SETTINGS, timings(seed, 0.1))[1] for seed in range(200)]
    assert sum(bool(row["differs"]) and row["paired"] < 1 for row in found) >= 190


@pytest.mark.statistical
def test_two_identical_methods_are_not_called_different():
    """At most 5 % of 1,000 runs are false alarms by design; more than 90 happen by chance once in 10^7."""
    alarms = sum(bool(rows(SETTINGS, timings(seed, 0.0))[1]["differs"]) for seed in range(1000))
    assert alarms <= 90
    assert binom.sf(90, 1000, 0.05) < 1e-6


def test_the_speed_up_is_that_of_spec_bench():
    """The ratio of mean tokens per second, not of total tokens over total time."""
    lines = timings(0, 0.0)
    speeds = {name: [100 / a["seconds"] for a in lines if a["setting"] == name] for name in ("plain", "other")}
    row = rows(SETTINGS, lines)[1]
    assert row["speedup_over_plain"] == pytest.approx(sum(speeds["other"]) / sum(speeds["plain"]))
    assert row["tokens_per_second"] == pytest.approx(
        sorted(speeds["other"])[11:13][0] / 2 + sorted(speeds["other"])[12] / 2
    )
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]
