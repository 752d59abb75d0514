"""What the README and the documentation show is run, loaded or parsed."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from pyramidsd.cli import VERBS, Parser
from pyramidsd.config import METHODS, PyramidConfig
from pyramidsd.models.embedded import is_fetched

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for i, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)):
            found.append(pytest.param(block, id=f"{page.name}-{i}"))
    assert found
    return found


@pytest.mark.real
@pytest.mark.skipif(not is_fetched("smollm2-135m"), reason="fetch it with: pyramidsd models --fetch smollm2-135m")
@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_run_and_print_an_answer(block, capsys):
    exec(compile(block, "block", "exec"), {})
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_blocks_are_pyramids(block, tmp_path):
    path = tmp_path / "pyramid.toml"
    path.write_text(block)
    assert PyramidConfig.load(path).method in METHODS


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_are_ones_that_the_command_line_takes(block):
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.split("<")[0], comments=True)
        if words and words[0] == "pyramidsd":
            parser = Parser()
            import_module(f"pyramidsd.tools.{words[1]}").add_arguments(parser)
            parser.parse_args(words[2:])
        elif words and words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


def test_every_method_and_verb_is_described():
    readme, manual = (ROOT / "README.md").read_text(), (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`{method}`" in readme for method in METHODS)
    assert all(f"pyramidsd {verb}" in manual for verb in VERBS)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
