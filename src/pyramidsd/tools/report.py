"""Make one HTML page, readable without a network, out of records of bench: tables, figures and coloured answers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyramidsd.tools.page import Drawing, Section, document
from pyramidsd.tools.records import Line, read_record
from pyramidsd.tools.views import (
    GRIDS,
    Entry,
    Part,
    answer_to_show,
    bars,
    chosen,
    curves,
    entries,
    entropies,
    grids,
    models,
    points,
    shortened,
    speeds,
    timed,
)
from pyramidsd.types import UsageError

if TYPE_CHECKING:  # matplotlib is an extra
    from pyramidsd.tools.charts import Chart

MOST_COLUMNS = 9  # of a heat map, so that the values fit into their cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="JSONL files made by bench --record")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    parser.add_argument("--pngs", type=Path, metavar="FOLDER", help="write the figures there as PNG files too")
    parser.add_argument(
        "--answer", metavar="PROMPT_ID", help="the answer shown token by token; default: that with the most deviation"
    )


def run(args: argparse.Namespace) -> int:
    """Read the records, draw, write the page, and say in one line what it holds."""
    if any(args.out.absolute() == path.absolute() for path in args.records):
        raise UsageError(f"--out {args.out} would overwrite the record; name another file")
    by_target: dict[tuple[str, ...], list[Part]] = {}
    for path in args.records:
        part = read_part(path)
        by_target.setdefault(part.target, []).append(part)
    pictures: list[tuple[str, Chart]] = []
    sections = [
        _section(parts, f"{number}-" if len(by_target) > 1 else "", args.answer, pictures)
        for number, parts in enumerate(by_target.values(), 1)
    ]
    if args.answer is not None and not any(section.shown for section in sections):
        raise UsageError(
            f"no pyramid has an answer to prompt {args.answer!r}; use an id of the prompts that were asked"
        )
    page = document(sections).encode("utf-8", "replace")
    _write(args.out, lambda: args.out.write_bytes(page))
    for name, figure in pictures if args.pngs is not None else []:
        path = args.pngs / f"{name}.png"
        _write(path, lambda figure=figure, path=path: _charts().png(figure, path))  # type: ignore[misc]
    answers = sum(len(part.answers) for section in sections for part in section.parts)
    print(f"{args.out}: {answers} answers, {len(pictures)} figures, {len(page) / 1000:.0f} kB")  # noqa: T201
    return 0


def _charts() -> Any:
    try:
        from pyramidsd.tools import charts
    except ImportError as error:
        raise UsageError("figures need matplotlib; install it with: pip install 'pyramidsd[plots]'") from error
    return charts


def _write(path: Path, write: Callable[[], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another place"
        ) from error


def read_part(path: Path) -> Part:
    """One record, checked.

    Raises:
        UsageError: it cannot be read, it is not of bench, or nothing was answered; the message names the line.
    """
    lines = read_record(path)
    of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("run", "answer", "trace")}
    settings = of_kind["run"][-1].get("settings") if of_kind["run"] else None
    if not settings:
        raise UsageError(f"{path} has no settings; give a record made by pyramidsd bench --record")
    for number, line in enumerate(lines, 1):
        problem = {"answer": _answer_problem, "trace": _trace_problem}.get(line["kind"], lambda _: None)(line)
        if problem:
            raise UsageError(f"{path}, line {number}: {problem}; make the record again, or remove the line")
    names = {setting["name"] for setting in settings}
    answers = [line for line in of_kind["answer"] if line["setting"] in names]
    if not answers:
        raise UsageError(f"{path} holds no answers yet; run its bench to the end first")
    return Part(path.name, of_kind["run"], settings, answers, of_kind["trace"])


_LISTS = ("token_ids", "pieces", "origin", "deviation", "passes", "stats")


def _answer_problem(line: Line) -> str | None:
    lacking = [key for key in ("setting", "prompt", "round", "seconds", *_LISTS) if key not in line]
    if lacking:
        return f"the answer lacks {', '.join(lacking)}"
    if not all(isinstance(line[key], list) for key in _LISTS):
        return f"{', '.join(_LISTS)} must be lists"
    if not (isinstance(line["seconds"], int | float) and 0 < line["seconds"] < math.inf):
        return f"seconds must be a positive number, got {line['seconds']!r}"
    lengths = {len(line[key]) for key in ("token_ids", "pieces", "origin", "deviation") if line[key]}
    if len(lengths) != 1:
        return "token_ids, pieces, origin and deviation differ in length, or are empty"
    if not (line["passes"] and line["passes"][-1]):
        return "passes must have one list per model, and some passes of the target"
    return None


def _trace_problem(line: Line) -> str | None:
    names, columns = line.get("models"), line.get("entropy")
    if not isinstance(names, list) or not isinstance(columns, list) or len(names) != len(columns):
        return "the trace must have as many lists of entropy as models"
    finite = all(isinstance(value, int | float) and 0 <= value < math.inf for column in columns for value in column)
    return None if finite else "entropies must be numbers from 0"


def _section(parts: Sequence[Part], prefix: str, prompt: str | None, pictures: list[tuple[str, Chart]]) -> Section:
    """All there is to say about the records of one target; its figures are added to `pictures`."""
    found = entries(parts)
    drawings, missing = [], []
    for name, title, caption, figures in _figures(parts, found):
        if not figures:
            missing.append(caption)
            continue
        numbered = [(prefix + name + (f"-{i}" if i > 1 else ""), figure) for i, figure in enumerate(figures, 1)]
        pictures.extend(numbered)
        svgs = [_charts().svg(figure, unique, f"{title}. {caption}") for unique, figure in numbered]
        drawings.append(Drawing(title, caption, svgs))
    shown = [(entry, answer) for entry in chosen(found) if (answer := answer_to_show(entry, prompt)) is not None]
    return Section(parts, found, drawings, missing, shown)


Planned = tuple[str, str, str, list["Chart"]]


def _figures(parts: Sequence[Part], found: Sequence[Entry]) -> Iterator[Planned]:
    """Name, title, caption and figures; without figures the caption says what is missing."""
    with _charts().drawing():
        yield _plane(found)
        for kind in GRIDS:
            yield from _heat_maps(found, kind)
        yield from _acceptance(found)
        yield _time(found)
        yield _entropy(parts, found)


def _plane(found: Sequence[Entry]) -> Planned:
    dots = points(found)
    if not any(dot.deviation for dot in dots):
        return "plane", "", "No figure of speed against deviation: no setting deviates from the target.", []
    fewest = min(entry.row["answers"] for entry in found)
    caption = (
        f"Up is faster, left is closer to the target; filled marks on the steps are beaten by no other setting. "
        f"Dashed: baselines. Bars: the interval of each median over {_count(fewest, found)} answers. "
        f"{len(dots)} settings; the front and the fastest of each method are named where there is room."
    )
    return "plane", "Speed against deviation", caption, [_charts().speed_and_deviation(dots, speeds(found).unit)]


def _count(fewest: int, found: Sequence[Entry]) -> str:
    most = max(entry.row["answers"] for entry in found)
    return str(most) if fewest == most else f"{fewest} to {most}"


def _heat_maps(found: Sequence[Entry], kind: str) -> Iterator[Planned]:
    key = {"tau": "thresholds", "l": "windows"}[kind]
    both = {"tau": "τ_Q and τ_T", "l": "l_D and l_Q"}[kind]
    drawable = 0
    for grid in grids(found, kind):
        columns, lines = (len({place[axis] for place in grid.speed}) for axis in (0, 1))
        turned = columns > min(lines, MOST_COLUMNS)
        if min(columns, lines) > MOST_COLUMNS:
            continue
        drawable += 1
        names = grid.names[::-1] if turned else grid.names
        speed, deviation = (
            {place[::-1] if turned else place: value for place, value in values.items()}
            for values in (grid.speed, grid.deviation)
        )
        digits = 2 if max(speed.values()) < 100 else 0
        unit = speeds(found).unit.split(" (")[0]
        caption = f"Left: {unit}. Right: mean deviation per token. Where several settings share a cell, the fastest."
        yield (
            f"{kind}-{grid.method}",
            f"{grid.method}: {key} {both}",
            caption,
            [
                _charts().heat_map(speed, names, digits, "Blues"),
                _charts().heat_map(deviation, names, 3, "Oranges"),
            ],
        )
    if not drawable:
        yield (
            kind,
            "",
            f"No heat map of {both}: no method was run with at least two (and at most nine) values of both.",
            [],
        )


def _acceptance(found: Sequence[Entry]) -> Iterator[Planned]:
    shown = chosen(found)
    of_boundary = curves(shown)
    if not of_boundary:
        yield "acceptance", "", "No figure of acceptance: the record holds no pyramid, only baselines.", []
    for number, ((below, above), lines) in enumerate(of_boundary.items(), 1):
        rounds = sorted(line.rounds for line in lines)
        drafts = f"{rounds[0]}" if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"
        chosen_from = len([entry for entry in found if entry.row["acceptance_at"]])
        caption = (
            f"Of the drafts that reached a position, how many were kept up to there; {drafts} drafts per "
            "setting, which are not independent within an answer, so no interval is drawn"
            + (
                f". {len(shown)} of {chosen_from} pyramids: the fastest, and those no other beats."
                if len(shown) < chosen_from
                else "."
            )
        )
        title = f"{shortened(above, 40)} checks {shortened(below, 40)}"
        yield f"acceptance-{number}", title, caption, [_charts().acceptance(lines)]


def _time(found: Sequence[Entry]) -> Planned:
    shown = timed(found)
    answers = _count(min(entry.row["answers"] for entry in shown), shown)
    caption = (
        f"Wall time of {answers} answers per setting, prompts included. The table below has milliseconds per forward."
    )
    return "time", "Where the time goes", caption, [_charts().time_shares(bars(shown), models(found))]


def _entropy(parts: Sequence[Part], found: Sequence[Entry]) -> Planned:
    samples = entropies(parts)
    if not samples:
        return "entropy", "", "No histogram of entropies: the record holds no traces; run bench with --trace.", []
    known = models(found)
    ordered = {name: samples[name] for name in sorted(samples, key=lambda n: known.index(n) if n in known else -1)}
    order = known if set(samples) <= set(known) else list(ordered)
    prompts = len({trace["prompt"] for part in parts for trace in part.traces})
    caption = (
        f"How unsure each model is of the next token, over the answers to {prompts} prompts; the line is the mean."
    )
    return "entropy", "Entropy of the models", caption, [_charts().entropies(ordered, order)]
