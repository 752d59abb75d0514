"""The options that describe a pyramid, shared by the verbs that run one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pyramidsd.accept import DIVERGENCES
from pyramidsd.config import EMBEDDED_PYRAMID, METHODS, PROMPT_LOOKUP, PyramidConfig, default_thresholds
from pyramidsd.level import default_windows
from pyramidsd.types import UsageError

Number = TypeVar("Number", int, float)

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")


def add_pyramid_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that make a `PyramidConfig`."""
    pyramid = parser.add_argument_group("pyramid", "where nothing is named, the embedded SmolLM2 pyramid runs")
    names = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
    pyramid.add_argument("--method", metavar="NAME", help=f"{names}. Default psd, or sd where there is no qualifier")
    pyramid.add_argument("--config", type=Path, metavar="FILE", help="a pyramid in TOML; other options override it")
    pyramid.add_argument("--target", metavar="MODEL", help="a folder, a GGUF file, or a name on the hub")
    pyramid.add_argument("--qualifier", metavar="MODEL", help="the same, or layers:N for the target's first N layers")
    pyramid.add_argument("--draft", metavar="MODEL", help=f"the same, or {PROMPT_LOOKUP}")
    pyramid.add_argument("--tau-q", type=float, metavar="T", help="threshold of the qualifier; default 0.3")
    pyramid.add_argument("--tau-t", type=float, metavar="T", help="threshold of the target; default 0.2")
    pyramid.add_argument("--divergence", metavar="NAME", help=f"{', '.join(DIVERGENCES)}; default js")
    pyramid.add_argument("--draft-tokens", type=int, metavar="N", help="l_D: drafted tokens per qualifier pass")
    pyramid.add_argument("--qualifier-tokens", type=int, metavar="N", help="l_Q: qualified tokens per target pass")
    pyramid.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    pyramid.add_argument("--top-k", type=int, metavar="N", help="0, the default, is off")
    pyramid.add_argument("--top-p", type=float, metavar="P", help="1, the default, is off")
    pyramid.add_argument("--min-p", type=float, metavar="P", help="0, the default, is off")
    pyramid.add_argument("--dtype", metavar="NAME", help="auto (default), float32, bfloat16, float16, float64")
    pyramid.add_argument("--device", metavar="NAME", help="auto (default), cpu, cuda, mps, or a numbered one as cuda:1")


def configured(args: argparse.Namespace) -> PyramidConfig:
    """The pyramid that the options describe.

    Raises:
        UsageError: they do not fit together.
    """
    base = _base(args)
    models = _named_models(args, base)
    default_method = base.method if args.config else {1: "plain", 2: "sd"}.get(len(models), "psd")
    config = PyramidConfig(
        method=default_method if args.method is None else args.method,
        models=models,
        **fitted_numbers(base, len(models) - 1),
        divergence=args.divergence or base.divergence,
        dtype=args.dtype or base.dtype,
        device=args.device or base.device,
        sampling=replace(
            base.sampling,
            **{key: getattr(args, key) for key in SAMPLING_OPTIONS if getattr(args, key) is not None},
        ),
    )
    return with_numbers(config, args.draft_tokens, args.qualifier_tokens, args.tau_q, args.tau_t)


def fitted_numbers(base: PyramidConfig, boundaries: int) -> dict[str, Any]:
    """Windows and thresholds for so many boundaries: those of `base` where it has as many, else the defaults."""
    if boundaries == len(base.models) - 1:
        return {"num_draft_tokens": base.num_draft_tokens, "thresholds": base.thresholds}
    return {"num_draft_tokens": default_windows(boundaries), "thresholds": default_thresholds(boundaries)}


def with_numbers(
    config: PyramidConfig,
    draft_tokens: int | None = None,
    qualifier_tokens: int | None = None,
    tau_q: float | None = None,
    tau_t: float | None = None,
) -> PyramidConfig:
    """`config` with the windows and thresholds of its lowest and highest boundary replaced where they are given.

    Raises:
        UsageError: a number is out of range.
    """
    several = len(config.models) > 2
    return replace(
        config,
        num_draft_tokens=_with_ends(config.num_draft_tokens, draft_tokens, qualifier_tokens if several else None),
        thresholds=_with_ends(config.thresholds, tau_q if several else None, tau_t),
    )


def _base(args: argparse.Namespace) -> PyramidConfig:
    if args.config:
        return PyramidConfig.load(args.config)
    if args.target is not None:  # the embedded qualifier belongs to the embedded target
        return PyramidConfig("sd", (PROMPT_LOOKUP, args.target), default_windows(1), default_thresholds(1))
    return EMBEDDED_PYRAMID


def _named_models(args: argparse.Namespace, base: PyramidConfig) -> tuple[str, ...]:
    *lower, target = base.models
    if (args.draft, args.qualifier) != (None, None) and len(lower) > 2:
        raise UsageError(f"the pyramid has {len(base.models)} levels; name its models in the config file")
    draft = lower[:1] if args.draft is None else [args.draft]
    qualifier = lower[1:] if args.qualifier is None else [args.qualifier]
    top = target if args.target is None else args.target
    return (*(draft or [PROMPT_LOOKUP] * len(qualifier)), *qualifier, top)


def _with_ends(values: Sequence[Number], first: Number | None, last: Number | None) -> tuple[Number, ...]:
    """`values` with those of the lowest and the highest boundary replaced where one is given."""
    changed = list(values)
    if changed and first is not None:
        changed[0] = first
    if changed and last is not None:
        changed[-1] = last
    return tuple(changed)
