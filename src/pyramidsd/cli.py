"""`pyramidsd VERB ...`: one file per verb under `tools`, of which only the chosen one is imported."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NoReturn

from pyramidsd import __version__
from pyramidsd.types import NumberError, UsageError

VERBS = {
    "generate": "answer a prompt",
    "bench": "measure speed, acceptance and deviation against baselines",
    "evaluate": "measure what lossy settings cost in right answers, and without labels",
    "report": "make a page with figures out of records of bench",
    "tune": "find the fastest pyramid for your prompts at a quality you choose",
    "plan": "predict the speed of a chain of models before any download",
    "models": "list what is usable here; fetch the embedded target",
}

EXTRAS = {"tune": "tune"}
"""The extra whose packages a verb needs from the start; `report` draws first when there is something to draw."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Exit status: 0 done, 1 failed, 2 bad use, 130 interrupted."""
    width = max(map(len, VERBS))
    parser = Parser(
        prog="pyramidsd",
        description="Faster answers from large language models by N-level speculative decoding.",
        epilog="\n".join(["verbs:", *(f"  {verb:{width}}  {about}" for verb, about in VERBS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pyramidsd {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of those below; each has its own --help")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words[:1])

    try:
        tool = import_module(f"pyramidsd.tools.{args.verb}")
    except ModuleNotFoundError as error:
        if args.verb not in EXTRAS:
            raise
        cure = f'run: pip install "pyramidsd[{EXTRAS[args.verb]}]"'
        print(f"pyramidsd {args.verb}: {error.name} is not installed; {cure}", file=sys.stderr)  # noqa: T201
        return 2
    verb_parser = Parser(prog=f"pyramidsd {args.verb}", description=tool.__doc__)
    tool.add_arguments(verb_parser)
    try:
        status: int = tool.run(verb_parser.parse_args(words[1:]))
    except UsageError as error:
        print(f"pyramidsd {args.verb}: {error}", file=sys.stderr)  # noqa: T201  the one line a user reads
        return 2
    except NumberError as error:
        print(f"pyramidsd {args.verb}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
