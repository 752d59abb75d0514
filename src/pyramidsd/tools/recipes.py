"""Which settings to run: a list of methods, and grids of settings in a TOML recipe."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from pyramidsd.config import METHODS, PyramidConfig, read_toml
from pyramidsd.tools.contest import PEERS, Setting
from pyramidsd.tools.options import add_pyramid_arguments, configured, fitted_numbers, with_numbers
from pyramidsd.types import UsageError


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `settings_from` reads."""
    peers = "; ".join(f"{name}: {about}" for name, about in PEERS.items())
    parser.add_argument(
        "--methods",
        metavar="A,B,...",
        help=f"any of {', '.join(METHODS)}, and of {peers}. Default: plain, and the method of the pyramid",
    )
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="grids of settings in TOML; see the manual")
    add_pyramid_arguments(parser)


def settings_from(args: argparse.Namespace) -> list[Setting]:
    """What the options and the recipe ask for, each setting once.

    Raises:
        UsageError: an unknown method or a recipe that cannot be read.
    """
    base = configured(args)
    methods = args.methods.split(",") if args.methods else []
    asked = [Setting.of(method.strip(), base) for method in methods]
    if args.recipe is not None:
        asked += read_recipe(args.recipe, base)
    if not asked:
        asked = [Setting.of(method, base) for method in dict.fromkeys(["plain", base.method])]
    settings: dict[str, Setting] = {}
    for setting in asked:
        first = settings.setdefault(setting.name, setting)
        if first.models != setting.models:
            raise UsageError(f"two settings would both be called {setting.name!r}; give their models other names")
    return list(settings.values())


_RECIPE = {
    "methods": str,
    "models": str,
    "draft_tokens": int,
    "qualifier_tokens": int,
    "tau_q": float,
    "tau_t": float,
    "divergence": str,
}


def read_recipe(path: Path, base: PyramidConfig) -> list[Setting]:
    """The settings of a recipe: every `[[run]]` is a grid, whose lists are crossed with each other.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a key or a value that does not belong there.
    """
    document = read_toml(path)
    runs = document.pop("run", None)
    if document or not isinstance(runs, list) or not runs:
        raise UsageError(f"{path} must hold [[run]] tables and nothing else")
    return [setting for number, run in enumerate(runs, 1) for setting in _grid(f"{path}, run {number}", run, base)]


def _grid(where: str, run: Mapping[str, Any], base: PyramidConfig) -> Iterator[Setting]:
    for key, values in run.items():
        if key not in _RECIPE:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(_RECIPE)}")
        kinds = (int, float) if _RECIPE[key] is float else (_RECIPE[key],)
        if not (isinstance(values, list) and values and all(type(value) in kinds for value in values)):
            raise UsageError(f"{where}: {key} must be a list of {_RECIPE[key].__name__} values, got {values!r}")
    if "methods" not in run:
        raise UsageError(f"{where}: methods are missing")
    models = tuple(run.get("models", base.models))
    grid = {key: values for key, values in run.items() if key != "models"}
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        config = with_numbers(
            replace(
                base,
                method="plain",  # any number of models will do, until the method is chosen
                models=models,
                **fitted_numbers(base, len(models) - 1),
                divergence=chosen.get("divergence", base.divergence),
            ),
            **{key: chosen.get(key) for key in ("draft_tokens", "qualifier_tokens", "tau_q", "tau_t")},
        )
        yield Setting.of(chosen["methods"], config)
