"""A pyramid written down: `PyramidConfig`, its TOML form, and the presets behind `--method`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyramidsd.accept import Fuzzy, Lossless, Match, Rule
from pyramidsd.drafters import PromptLookup
from pyramidsd.level import Level, default_windows, pyramid
from pyramidsd.models.base import Model
from pyramidsd.sampling import Sampling
from pyramidsd.types import Drafter, UsageError

if TYPE_CHECKING:  # loading is the only part that needs transformers
    from pyramidsd.models.hf import TransformersModel

Item = TypeVar("Item")

PROMPT_LOOKUP = "prompt-lookup"
FIRST_LAYERS = "layers:"


@dataclass(frozen=True, slots=True)
class Method:
    """A published way to put levels together.

    Attributes:
        num_levels: how many models it takes: 1 the target, 2 the lowest and the target, 3 all of them.
        rules: one rule per boundary, lowest first, from one threshold per boundary and a divergence.
        about: one line for people.
    """

    num_levels: int
    rules: Callable[[Sequence[float], str], list[Rule]]
    about: str

    def pick(self, models: Sequence[Item]) -> list[Item]:
        """The entries of the levels it uses, out of one entry per model, lowest first."""
        *lower, target = models
        return [*(lower if self.num_levels == 3 else lower[: self.num_levels - 1]), target]


METHODS = {
    "plain": Method(1, lambda _taus, _name: [], "plain decoding of the target"),
    "sd": Method(2, lambda _taus, _name: [Lossless()], "speculative decoding, exact"),
    "fsd": Method(2, lambda taus, name: [Fuzzy(taus[-1], name)], "fuzzy speculative decoding with tau-t"),
    "psd-a": Method(
        3,
        lambda taus, name: [*[Match() for _ in taus[1:]], Fuzzy(taus[-1], name)],
        "PyramidSD with assisted decoding below and fuzzy acceptance with tau-t on top",
    ),
    "psd-f": Method(
        3,
        lambda taus, name: [Fuzzy(tau, name) for tau in taus],
        "PyramidSD with fuzzy acceptance at both stages, as published",
    ),
    "psd": Method(
        3,
        lambda taus, name: [Fuzzy(tau, name, coupled=True) for tau in taus],
        "PyramidSD, coupled: the law of psd-f with more accepted tokens (recommended)",
    ),
    "nested": Method(3, lambda taus, _name: [Lossless() for _ in taus], "every stage exact: the lossless pyramid"),
}


def default_thresholds(boundaries: int) -> tuple[float, ...]:
    """0.2 at the highest boundary, 0.3 at those below."""
    return (*[0.3] * (boundaries - 1), 0.2)[:boundaries]


@dataclass(frozen=True, slots=True)
class PyramidConfig:
    """Everything that makes a pyramid, models and numbers lowest level first.

    Attributes:
        method: a name from `METHODS`.
        models: folders, GGUF files, hub names, names of embedded models, `layers:N` (the first N layers of the
            target) or, at the bottom, `prompt-lookup`.
        num_draft_tokens: one window per boundary: l_D, l_Q.
        thresholds: one threshold per boundary: tau_Q, tau_T.
        divergence: what the thresholds are compared with.
        dtype, device: as for `load_model`.
        sampling: how every level draws.
    """

    method: str = "psd"
    models: tuple[str, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    divergence: str = "js"
    dtype: str = "auto"
    device: str = "auto"
    sampling: Sampling = Sampling(temperature=0)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        if not self.models:
            raise UsageError("a pyramid needs at least one model: give models, lowest first")
        if self.models[-1] == PROMPT_LOOKUP or self.models[-1].startswith(FIRST_LAYERS):
            raise UsageError(f"{self.models[-1]} cannot be the target; name a model last")
        needed = METHODS[self.method].num_levels
        if len(self.models) < needed:
            lacking = "a draft" if needed == 2 else "a qualifier"
            raise UsageError(
                f"method {self.method} needs {needed} models; name {lacking} too, or use method plain or sd"
            )
        for name, given in (("num_draft_tokens", self.num_draft_tokens), ("thresholds", self.thresholds)):
            if len(given) != len(self.models) - 1:
                raise UsageError(f"{len(self.models)} models need {len(self.models) - 1} {name}, got {len(given)}")
        if any(window < 1 for window in self.num_draft_tokens):
            raise UsageError(f"a window must hold at least 1 token, got {list(self.num_draft_tokens)}")
        METHODS["psd-f"].rules(self.thresholds, self.divergence)  # uses, and so checks, every threshold

    def rules(self) -> list[Rule]:
        """The rules of the method, one per boundary it uses."""
        return METHODS[self.method].rules(self.thresholds, self.divergence)

    @staticmethod
    def load(path: Path) -> PyramidConfig:
        """Read the TOML form: the attributes as keys, `sampling` as a table. What is left out has its default: windows
        of 5, 15, 45 ... tokens, a threshold of 0.2 at the top and 0.3 below, greedy sampling.

        Raises:
            UsageError: no such file, not TOML, an unknown key, or a value of the wrong kind.
        """
        table = read_toml(path)
        sampling = table.pop("sampling", {})
        values = _checked(PyramidConfig, table, str(path))
        boundaries = len(values.get("models", ())) - 1
        values.setdefault("num_draft_tokens", default_windows(boundaries))
        values.setdefault("thresholds", default_thresholds(boundaries))
        greedy = {"temperature": 0}
        return PyramidConfig(
            **values, sampling=Sampling(**greedy | _checked(Sampling, sampling, f"{path}, [sampling]"))
        )


EMBEDDED_PYRAMID = PyramidConfig(
    models=(PROMPT_LOOKUP, f"{FIRST_LAYERS}24", "smollm2-135m"),
    num_draft_tokens=(4, 3),
    thresholds=(0.3, 0.2),
)
"""What runs where nothing is named: SmolLM2-135M-Instruct under its own first layers and prompt lookup."""


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a file.

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda v: isinstance(v, str)),
    "int": ("a whole number", lambda v: type(v) is int),
    "float": ("a number", lambda v: type(v) in (int, float)),
    "tuple[str, ...]": ("a list of strings", lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v)),
    "tuple[int, ...]": ("a list of whole numbers", lambda v: isinstance(v, list) and all(type(i) is int for i in v)),
    "tuple[float, ...]": (
        "a list of numbers",
        lambda v: isinstance(v, list) and all(type(i) in (int, float) for i in v),
    ),
}


def _checked(kind: type[Any], table: Any, where: str) -> dict[str, Any]:
    """`table` as arguments of the dataclass `kind`; keys and values that do not fit are refused by name."""
    known = {field.name: str(field.type) for field in fields(kind) if str(field.type) in _KINDS}
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table with {', '.join(known)}")
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        wanted, fits = _KINDS[known[key]]
        if not fits(value):
            raise UsageError(f"{where}: {key} must be {wanted}, got {value!r}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def load_models(config: PyramidConfig) -> list[Model | Drafter]:
    """The models that the method uses, lowest first.

    Raises:
        UsageError: one of them cannot be loaded.
    """
    return Loader().models(config)


class Loader:
    """Loads models, and keeps them: what several configs name is loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, ...], Any] = {}

    def models(self, config: PyramidConfig) -> list[Model | Drafter]:
        """As `load_models`."""
        return [self._get(name, config) for name in METHODS[config.method].pick(config.models)]

    def _get(self, name: str, config: PyramidConfig) -> Any:
        target = config.models[-1]
        within = target if name.startswith(FIRST_LAYERS) else ""
        key = (name, within, config.dtype, config.device)
        if key not in self._loaded:
            self._loaded[key] = _layers(name, self._get(target, config)) if within else _load(name, config)
        return self._loaded[key]


def _layers(name: str, target: TransformersModel) -> TransformersModel:
    from pyramidsd.models.hf import first_layers

    count = name.removeprefix(FIRST_LAYERS)
    if not (count.isascii() and count.isdigit()):
        raise UsageError(f"{name!r} must be {FIRST_LAYERS}N with a whole number N, such as {FIRST_LAYERS}12")
    return first_layers(target, int(count))


def _load(name: str, config: PyramidConfig) -> Model | Drafter:
    from pyramidsd.models.embedded import EMBEDDED, folder, is_fetched
    from pyramidsd.models.hf import load_model

    if name == PROMPT_LOOKUP:
        return PromptLookup()
    if name not in EMBEDDED:
        return load_model(name, config.dtype, config.device)
    if not is_fetched(name):
        raise UsageError(f"{name} is not here yet; fetch it with: pyramidsd models --fetch {name}")
    return load_model(folder(name), config.dtype, config.device)


def stack(config: PyramidConfig, models: Sequence[Model | Drafter]) -> Level:
    """The target's level over `models`, of which the method uses its own.

    Raises:
        UsageError: the models do not go together.
    """
    rules = config.rules()
    return pyramid(METHODS[config.method].pick(models), rules, config.num_draft_tokens[: len(rules)], config.sampling)
