"""Answer a prompt with a pyramid of models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pyramidsd.config import METHODS, PyramidConfig, load_models, stack
from pyramidsd.generate import Chunk, check_limits, generate
from pyramidsd.models.hf import quiet
from pyramidsd.tools.meter import Clock, measured
from pyramidsd.tools.options import add_pyramid_arguments, configured
from pyramidsd.tools.terminal import busy, err, out
from pyramidsd.types import UsageError

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
            "stats": [asdict(level) | {"proposed": level.proposed, "accepted": level.accepted} for level in stats],
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
