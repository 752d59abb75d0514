"""What a report shows, chosen from records: pure functions from rows to points, cells, curves and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pyramidsd.tools.records import Line
from pyramidsd.tools.summary import rows

Interval = tuple[float, float]

MOST_SHOWN = 6
"""Settings whose acceptance and answers are shown: as many as there are colours that can be told apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """One record.

    Attributes:
        name: of the file.
        runs: its `run` lines, one per sitting.
        settings: of the last of them.
        answers, traces: its other lines.
    """

    name: str
    runs: list[Line]
    settings: list[Line]
    answers: list[Line]
    traces: list[Line]

    @property
    def target(self) -> tuple[str, ...]:
        """What records must share for their speeds to stand in one figure: target, dtype, device."""
        run = self.runs[-1]
        return (self.settings[0]["models"][-1], str(run.get("dtype")), str(run.get("machine", {}).get("device")))


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting of one record.

    Attributes:
        name: unique in its section.
        label: short: the method, and what differs between settings of this method.
        row: its figures, from `summary.rows`.
        answers: its lines.
    """

    name: str
    label: str
    row: Mapping[str, Any]
    answers: Sequence[Line]

    @property
    def levels(self) -> list[str]:
        """The models, lowest first."""
        return list(self.row["models"])


@dataclass(frozen=True, slots=True)
class Point:
    """A setting in the plane of speed and deviation.

    Attributes:
        name, label: as in `Entry`.
        method: decides the colour and the shape.
        deviation: mean total variation per token; None for a baseline, which becomes a line across.
        speed: in the unit of the axis.
        interval: around `speed`; None where there are too few answers.
        on_front: whether no other setting is as fast with as little deviation.
    """

    name: str
    label: str
    method: str
    deviation: float | None
    speed: float
    interval: Interval | None
    on_front: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Shares of drafts kept, by position, for one setting; `rounds` is the number of drafts."""

    name: str
    label: str
    shares: Sequence[float]
    rounds: int


@dataclass(frozen=True, slots=True)
class Bar:
    """Where the time of one setting goes: one share per model, and the rest."""

    name: str
    label: str
    models: Sequence[str]
    shares: Sequence[float]
    rest: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of the settings of one method, by column and row."""

    method: str
    names: tuple[str, str]
    speed: Mapping[Interval, float]
    deviation: Mapping[Interval, float]


def entries(parts: Sequence[Part]) -> list[Entry]:
    """The settings of some records, each compared with the plain decoding of its own record."""
    counted = Counter(setting["name"] for part in parts for setting in part.settings)
    found = []
    for part in parts:
        table = {row["setting"]: row for row in rows(part.settings, part.answers)}
        for setting in part.settings:
            if setting["name"] in table:
                suffix = f" ({part.name})" if counted[setting["name"]] > 1 else ""
                answers = [answer for answer in part.answers if answer["setting"] == setting["name"]]
                found.append((setting["name"] + suffix, suffix, setting, table[setting["name"]], answers))
    labels = _labels([(name, suffix, setting) for name, suffix, setting, *_ in found])
    return [Entry(name, label, row, answers) for label, (name, _, _, row, answers) in zip(labels, found, strict=True)]


def shortened(text: str, length: int) -> str:
    """The text, with an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _labels(named: Sequence[tuple[str, str, Line]]) -> list[str]:
    """The method and what varies within it; the whole name where that is not enough."""
    traits: list[Callable[[Line], str]] = [
        lambda setting: "+".join(setting["models"][:-1]),
        lambda setting: "l=" + ",".join(map(str, setting["num_draft_tokens"])),
        lambda setting: "τ=" + ",".join(f"{value:g}" for value in setting["thresholds"]),
        lambda setting: str(setting.get("divergence", "")),
    ]
    of_method: dict[str, list[Line]] = {}
    for _, _, setting in named:
        of_method.setdefault(setting["method"], []).append(setting)
    varying = {
        method: [trait for trait in traits if len({trait(setting) for setting in settings}) > 1]
        for method, settings in of_method.items()
    }
    short = [
        " ".join([setting["method"], *(trait(setting) for trait in varying[setting["method"]])]) + suffix
        for _, suffix, setting in named
    ]
    unique = len(set(short)) == len(short)
    return [shortened(label if unique else name, 34) for label, (name, _, _) in zip(short, named, strict=True)]


def models(found: Sequence[Entry]) -> list[str]:
    """All models, those of the deepest pyramid first, the target last."""
    target = found[0].levels[-1]
    by_depth = sorted(found, key=lambda entry: -len(entry.levels))
    lower = dict.fromkeys(model for entry in by_depth for model in entry.levels[:-1] if model != target)
    return [*lower, target]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast each setting is, in the best unit that all settings have."""

    unit: str
    values: Mapping[str, tuple[float, Interval | None]]


def speeds(found: Sequence[Entry]) -> Speeds:
    """The median ratio to plain decoding with its interval, or tokens per second where that was not run."""
    if all(entry.row["paired"] is not None for entry in found):
        return Speeds(
            "speed over plain decoding (median, 95 % interval)",
            {entry.name: (entry.row["paired"], entry.row["interval"]) for entry in found},
        )
    return Speeds(
        "tokens/s (median, quartiles)",
        {entry.name: (entry.row["tokens_per_second"], tuple(entry.row["quartiles"])) for entry in found},
    )


def front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (deviation, speed) pairs no other beats: with no more deviation no less speed, and better in one."""
    kept = [False] * len(pairs)
    fastest, least = -1.0, -1.0
    for i in sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -pairs[i][1])):
        deviation, speed = pairs[i]
        kept[i] = speed > fastest or (speed, deviation) == (fastest, least)
        if kept[i]:
            fastest, least = speed, deviation
    return kept


def points(found: Sequence[Entry]) -> list[Point]:
    """Every setting as a point, or as a line where its deviation is not known."""
    measured = [entry for entry in found if entry.row["deviation"] is not None]
    fast = speeds(found).values
    best = front([(entry.row["deviation"], fast[entry.name][0]) for entry in measured])
    on_front = {entry.name for entry, is_best in zip(measured, best, strict=True) if is_best}
    return [
        Point(
            entry.name,
            entry.label,
            entry.row["method"],
            entry.row["deviation"],
            *fast[entry.name],
            entry.name in on_front,
        )
        for entry in found
    ]


GRIDS = {
    "tau": ("thresholds", ("τ_Q, the lowest threshold", "τ_T, the highest threshold")),
    "l": ("num_draft_tokens", ("l_D, the lowest window", "l_Q, the highest window")),
}


def grids(found: Sequence[Entry], kind: str) -> list[Grid]:
    """The methods that were run with two values or more of both numbers of a kind in `GRIDS`; where several settings
    share a cell, the fastest."""
    key, (column, row) = GRIDS[kind]
    fast = speeds(found).values
    by_method: dict[str, dict[Interval, Entry]] = {}
    for entry in found:
        numbers = entry.row[key]
        if len(numbers) < 2 or entry.row["deviation"] is None:
            continue
        cells = by_method.setdefault(entry.row["method"], {})
        place = (numbers[0], numbers[-1])
        cells[place] = max(cells.get(place, entry), entry, key=lambda e: fast[e.name][0])
    return [
        Grid(
            method,
            (column, row),
            {place: fast[entry.name][0] for place, entry in cells.items()},
            {place: entry.row["deviation"] for place, entry in cells.items()},
        )
        for method, cells in by_method.items()
        if min(len({place[axis] for place in cells}) for axis in (0, 1)) > 1
    ]


def chosen(found: Sequence[Entry]) -> list[Entry]:
    """The pyramids to look at closely: all, or the front, then the fastest of each method, then the fastest."""
    able = [entry for entry in found if entry.row["acceptance_at"]]
    fast = speeds(found).values
    best = {point.name for point in points(found) if point.on_front}
    by_speed = sorted(able, key=lambda entry: -fast[entry.name][0])
    first_of = {entry.row["method"]: entry.name for entry in reversed(by_speed)}
    ranked = sorted(by_speed, key=lambda entry: (entry.name not in best, first_of[entry.row["method"]] != entry.name))
    names = {entry.name for entry in ranked[:MOST_SHOWN]}
    return [entry for entry in found if entry.name in names]


def timed(found: Sequence[Entry]) -> list[Entry]:
    """The settings whose time is split into levels: the chosen pyramids, and everything that is no pyramid."""
    close = {entry.name for entry in chosen(found)}
    return [entry for entry in found if entry.name in close or not entry.row["acceptance_at"]]


def curves(shown: Sequence[Entry]) -> dict[tuple[str, str], list[Curve]]:
    """Acceptance by position for each boundary: (the model that proposes, the model that verifies)."""
    found: dict[tuple[str, str], list[Curve]] = {}
    for entry in shown:
        levels = entry.levels
        for below, shares in enumerate(entry.row["acceptance_at"]):
            if shares:
                rounds = sum(
                    answer["stats"][below + 1]["proposed_at"][:1][0]
                    for answer in entry.answers
                    if answer["stats"][below + 1]["proposed_at"]
                )
                curve = Curve(entry.name, entry.label, shares, rounds)
                found.setdefault((levels[below], levels[below + 1]), []).append(curve)
    return found


def bars(shown: Sequence[Entry]) -> list[Bar]:
    """Where the time of each setting goes."""
    return [
        Bar(entry.name, entry.label, entry.levels, entry.row["forward_share"], max(0.0, entry.row["overhead"]))
        for entry in shown
    ]


def entropies(parts: Sequence[Part]) -> dict[str, list[float]]:
    """The entropies of each model that has any, over all traces."""
    found: dict[str, list[float]] = {}
    for trace in (trace for part in parts for trace in part.traces):
        for model, values in zip(trace["models"], trace["entropy"], strict=True):
            if values:
                found.setdefault(model, []).extend(values)
    return found


def answer_to_show(entry: Entry, prompt: str | None) -> Line | None:
    """The answer to this prompt, or that with the largest mean deviation; None where no token has an origin."""
    able = [a for a in entry.answers if a["origin"] and (prompt is None or a["prompt"] == prompt)]
    return max(able, key=lambda answer: fmean(answer["deviation"]), default=None)
