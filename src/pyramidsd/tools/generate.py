"""Answer a prompt with a pyramid of models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pyramidsd.accept import DIVERGENCES
from pyramidsd.config import (
    EMBEDDED_PYRAMID,
    METHODS,
    PROMPT_LOOKUP,
    PyramidConfig,
    default_thresholds,
    load_models,
    stack,
)
from pyramidsd.generate import Chunk, check_limits, generate
from pyramidsd.level import default_windows
from pyramidsd.models.hf import quiet
from pyramidsd.tools.meter import Clock, measured
from pyramidsd.tools.terminal import busy, err, out
from pyramidsd.types import UsageError

Number = TypeVar("Number", int, float)

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")
COLOURS = ("green", "yellow", "cyan", "magenta", "blue")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--compare", action="store_true", help="answer with plain decoding too, and show both")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_pyramid_arguments(parser)


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
    boundaries = len(models) - 1
    fits = boundaries == len(base.models) - 1
    windows = base.num_draft_tokens if fits else default_windows(boundaries)
    thresholds = base.thresholds if fits else default_thresholds(boundaries)
    default_method = base.method if args.config else {1: "plain", 2: "sd"}.get(len(models), "psd")
    return PyramidConfig(
        method=default_method if args.method is None else args.method,
        models=models,
        num_draft_tokens=_with_ends(windows, args.draft_tokens, args.qualifier_tokens if boundaries > 1 else None),
        thresholds=_with_ends(thresholds, args.tau_q if boundaries > 1 else None, args.tau_t),
        divergence=args.divergence or base.divergence,
        dtype=args.dtype or base.dtype,
        device=args.device or base.device,
        sampling=replace(
            base.sampling,
            **{key: getattr(args, key) for key in SAMPLING_OPTIONS if getattr(args, key) is not None},
        ),
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


@dataclass(frozen=True)
class Answer:
    """One answer and what it took."""

    config: PyramidConfig
    chunks: list[Chunk]
    clock: Clock

    def report(self) -> dict[str, Any]:
        """What `--json` prints; rates and shares as plain numbers, boundaries lowest first."""
        token_ids = [token for chunk in self.chunks for token in chunk.token_ids]
        deviation = [value for chunk in self.chunks for value in chunk.deviation]
        stats = self.chunks[-1].stats
        return {
            "method": self.config.method,
            "models": METHODS[self.config.method].pick(self.config.models),
            "text": "".join(chunk.text for chunk in self.chunks),
            "token_ids": token_ids,
            "origin": [level for chunk in self.chunks for level in chunk.origin],
            "finish_reason": self.chunks[-1].finish_reason,
            "seconds": self.clock.seconds,
            "tokens_per_second": len(token_ids) / self.clock.seconds,
            "tokens_per_target_pass": len(token_ids) / stats[-1].forwards,
            "acceptance": [level.acceptance for level in stats[1:]],
            "deviation": sum(deviation) / len(deviation),
            "worst_deviation": max(deviation),
            "overhead": self.clock.overhead,
            "stats": [asdict(level) for level in stats],
        }


def run(args: argparse.Namespace) -> int:
    """Answer, and show what it took."""
    quiet()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UsageError("the prompt is empty; give at least one character")
    check_limits(args.max_new_tokens, args.stop)
    config = configured(args)
    with busy("Loading " + ", ".join(METHODS[config.method].pick(config.models))):
        models = load_models(config)
    answers = [_answer(args, config, models, prompt, show=not args.json)]
    if args.compare:
        answers.append(_answer(args, replace(config, method="plain"), models, prompt, show=False))
    if args.json:
        report = answers[0].report() | {answer.config.method: answer.report() for answer in answers[1:]}
        print(json.dumps(report))  # noqa: T201  as it is: a console would read emoji codes into it
    else:
        err.print(_table(answers))
    return 0


def _answer(args: argparse.Namespace, config: PyramidConfig, models: Sequence[Any], prompt: str, show: bool) -> Answer:
    tokenizer = models[-1].tokenizer
    chat = [{"role": "user", "content": prompt}]
    request = prompt if args.raw or not tokenizer.chat_template else chat
    chunks: list[Chunk] = []
    top = stack(config, models)
    with (
        busy(f"Answering with {config.method}", args.max_new_tokens, shown=not show) as advance,
        measured(models) as clock,
    ):
        for chunk in generate(top, tokenizer, request, args.max_new_tokens, args.seed, args.stop):
            chunks.append(chunk)
            advance(len(chunk.token_ids))
            if show:
                _print_chunk(chunk)
    if show:
        out.print()
    return Answer(config, chunks, clock)


def _print_chunk(chunk: Chunk) -> None:
    for piece, level in zip(chunk.pieces, chunk.origin, strict=True):
        segment = Segment(piece, Style.parse(COLOURS[level % len(COLOURS)]))  # a Text would lose tabs and returns
        out.print(Segments([segment]), end="")


def _table(answers: Sequence[Answer]) -> Table:
    table = Table("method", "tokens", "tokens/s", "tokens per target pass", "acceptance, lowest first", "deviation")
    for answer in answers:
        report = answer.report()
        table.add_row(
            report["method"],
            str(len(report["token_ids"])),
            f"{report['tokens_per_second']:.1f}",
            f"{report['tokens_per_target_pass']:.2f}",
            "  ".join(f"{share:.2f}" for share in report["acceptance"]) or "-",
            f"{report['deviation']:.3f}",
        )
    proposers = answers[0].report()["models"]
    table.caption = Text("proposed by ") + Text(", ").join(
        Text(name, style=COLOURS[level % len(COLOURS)]) for level, name in enumerate(proposers)
    )
    return table
