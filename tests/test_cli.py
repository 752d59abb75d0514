"""The command line: one line and exit status 2 for bad input; one JSON object that adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import tiny
from pyramidsd.cli import main
from pyramidsd.config import METHODS, PyramidConfig
from pyramidsd.generate import Chunk
from pyramidsd.tools.generate import _print_chunk
from pyramidsd.types import Laws


def save(folder: Path, letters: str = "abcdefghijklmnopqrstuvwxyz ", **changes) -> Path:
    """A tiny model whose tokens are single letters."""
    vocab = {letter: token for token, letter in enumerate(letters)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=letters[-1]))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tiny.causal_lm("llama", dtype=torch.float32, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("model")))


def truncated(folder: Path) -> str:
    weights = save(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return str(folder)


def refusal(capsys, *arguments) -> str:
    """The one line on stderr of a command that must end with status 2 and print nothing else."""
    try:
        status = main(list(arguments))
    except SystemExit as stopped:  # argparse
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err


BAD_VALUES = {
    "unknown method": (["--method", "psdx"], "choose one of plain, sd"),
    "tau above the range": (["--qualifier", "layers:2", "--tau-q", "0.9"], "from 0 to 0.6931"),
    "tau below the range": (["--qualifier", "layers:2", "--tau-t", "-0.1"], "from 0 to 0.6931"),
    "tau of no use to the method": (["--method", "sd", "--tau-t", "9"], "from 0 to 0.6931"),
    "tau not a number": (["--tau-t", "much"], "--tau-t"),
    "unknown divergence": (["--method", "fsd", "--divergence", "hellinger"], "choose one of js"),
    "no qualifier": (["--method", "psd"], "name a qualifier"),
    "window of nothing": (["--draft-tokens", "0"], "at least 1 token"),
    "no new tokens": (["--max-new-tokens", "0"], "at least 1"),
    "fewer than no tokens": (["--max-new-tokens", "-3"], "at least 1"),
    "negative temperature": (["--temperature", "-1"], "temperature must be 0"),
    "unknown dtype": (["--dtype", "int3"], "float32"),
    "unknown device": (["--device", "abacus"], "choose one of auto"),
    "too many layers": (["--qualifier", "layers:9"], "from 1 to 3"),
    "layers with no plain number": (["--qualifier", "layers:²"], "layers:N"),
    "no name": (["--draft", ""], "the name of a model is empty"),
    "colder than float32": (["--temperature", "1e-320"], "at least 1e-05"),
    "empty stop string": (["--stop", ""], "must not be empty"),
    "layers without a number": (["--qualifier", "layers:some"], "layers:N"),
    "no such draft": (["--draft", "./nowhere"], "there is no folder"),
    "unknown option": (["--speed", "9"], "--help"),
    "too long with the answer": (["--max-new-tokens", "90"], "lower max_new_tokens to at most"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_gets_one_line_with_the_cure(case, model, capsys):
    arguments, cure = BAD_VALUES[case]
    assert cure in refusal(capsys, "generate", "a prompt of letters", "--target", model, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(model, capsys):
    assert "use --device cpu or auto" in refusal(capsys, "generate", "a", "--target", model, "--device", "cuda")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(prompt, model, capsys):
    assert "the prompt is empty" in refusal(capsys, "generate", prompt, "--target", model)


def test_a_prompt_longer_than_the_context(model, capsys):
    assert "shorten the prompt" in refusal(capsys, "generate", "a" * 200, "--target", model)


def test_damaged_or_missing_files(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("no model")
    gguf = tmp_path / "cut.gguf"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(5))
    for target, cure in {
        str(tmp_path / "nowhere"): "there is no folder",
        str(tmp_path / "nowhere.gguf"): "there is no file",
        truncated(tmp_path / "cut"): "check that it is a whole safetensors or GGUF model",
        "": "the name of a model is empty",
        str(text): "is a file, but not GGUF",
        str(gguf): "check that it is a whole safetensors or GGUF model",
    }.items():
        assert cure in refusal(capsys, "generate", "a", "--target", target)


def test_different_tokenizers(tmp_path, model, capsys):
    other = str(save(tmp_path / "other", letters="zbcdefghijklmnopqrstuvwxya "))
    line = refusal(capsys, "generate", "abc", "--target", model, "--draft", other)
    assert "id 0 is 'z' in one and 'a' in the target" in line


BAD_CONFIGS = {
    "unknown key": ('models = ["x"]\nspeed = 9', "unknown key 'speed'; known are method"),
    "unknown sampling key": ('models = ["x"]\n[sampling]\nheat = 1', "unknown key 'heat'"),
    "wrong kind": ('models = "x"', "models must be a list of strings"),
    "wrong kind of number": (
        'models = ["x", "y"]\nnum_draft_tokens = [1.5]',
        "num_draft_tokens must be a list of whole",
    ),
    "not TOML": ("models = [", "is not TOML"),
    "no models": ('method = "plain"', "at least one model"),
    "too few windows": ('models = ["x", "y", "z"]\nnum_draft_tokens = [4]', "3 models need 2 num_draft_tokens, got 1"),
    "no target": ('models = ["prompt-lookup"]', "prompt-lookup cannot be the target"),
    "sampling is no table": ('models = ["x"]\nsampling = 3', "must be a table"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_file_is_refused_by_key(case, tmp_path, capsys):
    text, cure = BAD_CONFIGS[case]
    path = tmp_path / "pyramid.toml"
    path.write_text(text)
    assert cure in refusal(capsys, "generate", "a", "--config", str(path))


def test_a_missing_config_file(capsys):
    assert "check the path" in refusal(capsys, "generate", "a", "--config", "nowhere.toml")


def test_unknown_verbs_and_models(capsys):
    assert "--help" in refusal(capsys, "fly")
    assert "--help" in refusal(capsys, "models", "--fetch", "gpt-9")


def answer(capsys, *arguments) -> dict:
    assert main(["generate", "--max-new-tokens", "40", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", METHODS)
def test_the_figures_of_the_report_add_up(method, model, capsys):
    report = answer(
        capsys, "abcabcabc", "--target", model, "--qualifier", "layers:2", "--method", method, "--max-new-tokens", "20"
    )
    stats = report["stats"]
    assert len(report["token_ids"]) == len(report["origin"]) == 20
    assert report["tokens_per_second"] == pytest.approx(20 / report["seconds"])
    assert report["tokens_per_target_pass"] == pytest.approx(20 / stats[-1]["forwards"])
    assert report["acceptance"] == [s["accepted"] / max(s["proposed"], 1) for s in stats[1:]]
    assert len(report["models"]) == len(stats) == {"plain": 1, "sd": 2, "fsd": 2}.get(method, 3)
    assert 0 <= report["deviation"] <= report["worst_deviation"] <= 1
    assert 0 < report["overhead"] < 1
    if method in ("plain", "sd", "nested"):
        assert report["worst_deviation"] == 0


def test_exact_methods_give_the_answer_of_plain_decoding(model, capsys):
    report = answer(capsys, "abcabc", "--target", model, "--qualifier", "layers:2", "--method", "nested", "--compare")
    assert report["token_ids"] == report["plain"]["token_ids"]


def test_options_override_the_config_file(tmp_path, model, capsys):
    path = tmp_path / "pyramid.toml"
    path.write_text(
        f'method = "psd"\nmodels = ["prompt-lookup", "layers:1", "layers:2", "{model}"]\n'
        "num_draft_tokens = [2, 3, 4]\nthresholds = [0.1, 0.2, 0.3]\n[sampling]\ntemperature = 1.0\n"
    )
    read = PyramidConfig.load(path)
    assert (read.num_draft_tokens, read.thresholds, read.sampling.temperature) == ((2, 3, 4), (0.1, 0.2, 0.3), 1.0)
    report = answer(capsys, "abcabc", "--config", str(path), "--method", "nested", "--temperature", "0", "--raw")
    plain = answer(capsys, "abcabc", "--target", model, "--method", "plain")
    assert report["token_ids"] == plain["token_ids"]
    assert len(report["stats"]) == 4


def test_the_same_seed_gives_the_same_answer(model, capsys):
    sampled = ["abc", "--target", model, "--temperature", "1", "--max-new-tokens", "20"]
    first, again = answer(capsys, *sampled, "--seed", "3"), answer(capsys, *sampled, "--seed", "3")
    other = answer(capsys, *sampled, "--seed", "4")
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_a_pipe_gets_the_text_alone(model):
    command = [sys.executable, "-m", "pyramidsd", "generate", "-", "--target", model, "--max-new-tokens", "12"]
    done = subprocess.run(command, input="abcabc", capture_output=True, text=True, check=True)
    report = subprocess.run([*command, "--json"], input="abcabc", capture_output=True, text=True, check=True)
    assert done.stdout == json.loads(report.stdout)["text"] + "\n"
    assert "tokens/s" in done.stderr


def test_models_lists_what_is_usable(capsys):
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed["models"]] == ["smollm2-135m"]
    assert "cpu" in listed["devices"]


def test_input_that_is_no_text(model, capsys):
    assert "not valid UTF-8" in refusal(capsys, "generate", "a\udcff", "--target", model)


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "make room there, or choose another cache folder" in refusal(capsys, "models", "--fetch", "smollm2-135m")


def test_nothing_asked(capsys):
    assert refusal(capsys).startswith("pyramidsd: the following arguments are required: VERB;")


def test_a_config_has_defaults(tmp_path):
    path = tmp_path / "pyramid.toml"
    path.write_text('models = ["a", "b", "c", "d"]')
    read = PyramidConfig.load(path)
    assert (read.num_draft_tokens, read.thresholds) == ((5, 15, 45), (0.3, 0.3, 0.2))
    assert (
        read.sampling
        == PyramidConfig(models=("a", "b", "c", "d"), num_draft_tokens=(1,) * 3, thresholds=(0,) * 3).sampling
    )
    assert read.sampling.temperature == 0
    path.write_text('method = "plain"\nmodels = ["a"]\n[sampling]\ntop_k = 5')
    assert (PyramidConfig.load(path).sampling.temperature, PyramidConfig.load(path).sampling.top_k) == (0, 5)


def test_streamed_text_is_printed_as_it_is(capsys):
    pieces = ["a\tb\r", ":smile: [bold]", " \x0c\n"]
    _print_chunk(Chunk([1, 2, 3], pieces, [0, 1, 2], [0.0] * 3, Laws.empty(), None, ()))
    assert capsys.readouterr().out == "".join(pieces)
