"""Planning: published formulas, and what bench measured."""

import json
from pathlib import Path

import pytest

from pyramidsd.cli import main
from pyramidsd.tools.records import read_record
from test_bench import bench
from test_cli import refusal, save

RESULTS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("presets-*.jsonl"))


def plan(capsys, *arguments) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_levels_at_a_constant_cost_ratio_are_the_known_formula(capsys):
    """(1 - a^(k+1)) / ((1 - a)(k c + 1)), Leviathan et al., arXiv 2211.17192, theorem 3.8, for a long answer."""
    a, k, c = 0.8, 5, 0.1
    report = plan(capsys, "--times", "5,50", "--acceptance", str(a), "--windows", str(k), "--max-new-tokens", "100000")
    assert [row["chain"] for row in report["rows"]] == [["50 ms"], ["5 ms", "50 ms"]]
    assert report["rows"][0]["tokens_per_second"] == pytest.approx(20)
    assert report["rows"][1]["speedup_over_plain"] == pytest.approx(
        (1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)), rel=1e-3
    )


def test_the_formula_of_the_paper_beside_the_expectation(capsys):
    """V_FSD = b (l + 1) / (l / V_D + 1 / V_Q), and the same once more for V_PSD; arXiv 2510.12966."""
    report = plan(capsys, "--times", "10,40,160", "--acceptance", "0.7,0.6", "--windows", "3,6")
    (row,) = [row for row in report["rows"] if len(row["chain"]) == 3]
    v_fsd = 0.7 * 4 / (3 * 0.010 + 0.040)
    assert row["fit_formula_tokens_per_second"] == pytest.approx(0.6 * 7 / (6 / v_fsd + 0.160))


def test_a_third_level_pays_only_where_it_is_cheap_and_agrees(capsys):
    pays = plan(capsys, "--times", "2,40,400", "--acceptance", "0.7,0.9")
    assert "2 ms < 40 ms < 400 ms" in pays["verdict"]
    useless = plan(capsys, "--times", "39,40,400", "--acceptance", "0.7,0.9")
    assert "40 ms < 400 ms with windows" in useless["verdict"]
    assert "39 ms" not in useless["verdict"]
    none = plan(capsys, "--times", "300,390,400", "--acceptance", "0.1,0.1")
    assert "no level pays" in none["verdict"]


def test_the_windows_are_the_best_of_those_tried(capsys):
    best = plan(capsys, "--times", "5,50", "--acceptance", "0.8")["rows"][1]
    others = [
        plan(capsys, "--times", "5,50", "--acceptance", "0.8", "--windows", str(k))["rows"][1]["tokens_per_second"]
        for k in (1, 2, 4, 6, 8, 10, 12, 16, 32)
    ]
    assert best["tokens_per_second"] >= max(others)


def test_sizes_give_the_roofline_and_the_weights(capsys):
    """8 billion parameters of 2 bytes over 1008 GB/s are 63 tokens a second."""
    report = plan(capsys, "--sizes", "1B,3B,8B", "--acceptance", "0.6,0.7")
    assert len(report["rows"]) == 4
    assert report["rows"][0]["tokens_per_second"] == pytest.approx(63)
    assert report["rows"][-1]["weights_gigabytes"] == pytest.approx(24)


BAD = {
    "nothing": ([], "give either --sizes"),
    "both": (["--sizes", "1B", "--times", "3"], "give either --sizes"),
    "no number": (["--times", "3,much"], "--times must be numbers"),
    "no size": (["--sizes", "1B,big", "--acceptance", "0.5"], "a size is a number and M or B"),
    "no time": (["--times", "3,0", "--acceptance", "0.5"], "milliseconds above 0"),
    "too few shares": (["--times", "3,4,5", "--acceptance", "0.5"], "3 models have 2 boundaries"),
    "no shares": (["--times", "3,4"], "--acceptance must be numbers"),
    "no share": (["--times", "3,4", "--acceptance", "1.5"], "acceptance must lie in [0, 1]"),
    "no window": (["--times", "3,4", "--acceptance", "0.5", "--windows", "0"], "at least 1 token"),
    "no tokens": (["--times", "3,4", "--acceptance", "0.5", "--max-new-tokens", "0"], "at least 1"),
    "no record": (["--record", "nowhere.jsonl"], "check the path"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, capsys):
    arguments, cure = BAD[case]
    assert cure in refusal(capsys, "plan", *arguments)


def test_a_record_is_predicted_from_its_own_forwards(tmp_path, capsys):
    """The timings of tiny models mean nothing, so only the sums are checked here; records of real ones follow."""
    model = str(save(tmp_path / "target"))
    prompts, record = tmp_path / "prompts.txt", tmp_path / "record.jsonl"
    prompts.write_text("abcabcab\nxyzxyz\nhello\n")
    methods = "plain,sd,nested,psd,hf-plain"
    arguments = ["--methods", methods, "--target", model, "--qualifier", "layers:2", "--prompts", str(prompts)]
    bench(capsys, *arguments, "--max-new-tokens", "30", "--record", str(record))
    report = plan(capsys, "--record", str(record))
    assert len(report["rows"]) == 4  # the baseline of transformers has no levels to plan
    assert report["worst_error"] == max(abs(row["error"]) for row in report["rows"])
    answers = [line for line in read_record(record) if line["kind"] == "answer" and line["setting"] == "plain"]
    seconds = sum(answer["seconds"] for answer in answers)
    assert report["rows"][0]["measured_tokens_per_second"] == pytest.approx(3 * 3 * 30 / seconds)
    for row in report["rows"]:
        assert row["error"] == row["predicted_tokens_per_second"] / row["measured_tokens_per_second"] - 1


@pytest.mark.parametrize("record", RESULTS, ids=lambda path: path.stem)
def test_committed_records_are_predicted_within_a_tenth(record, capsys):
    report = plan(capsys, "--record", str(record))
    assert report["worst_error"] < 0.1
