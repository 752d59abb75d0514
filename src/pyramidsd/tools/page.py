"""A report as HTML: text, tables and coloured answers around figures that are drawn already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from statistics import fmean
from string import Template

from pyramidsd.tools.records import Line
from pyramidsd.tools.views import Entry, Part, models, shortened, timed

MOST_TOKENS = 1200
"""Of one answer; more would make the page heavy, and nobody reads them."""

DEVIATIONS = (0.0, 0.05, 0.2, 0.5)
"""Above each of them the line under a token is one step heavier."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One or more SVG elements under one heading, with what has to be said about them."""

    title: str
    caption: str
    charts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Section:
    """All records of one target.

    Attributes:
        parts: its records.
        entries: their settings.
        drawings: its figures.
        missing: one line for each figure whose values are not in the records.
        shown: the answers to show token by token.
    """

    parts: Sequence[Part]
    entries: Sequence[Entry]
    drawings: Sequence[Drawing]
    missing: Sequence[str]
    shown: Sequence[tuple[Entry, Line]]


def document(sections: Sequence[Section]) -> str:
    """The whole page."""
    title = "pyramidsd: " + ", ".join(dict.fromkeys(part.name for section in sections for part in section.parts))
    body = "<h1>Speed and deviation of speculative decoding</h1>\n" + "\n".join(
        _section(section, number) for number, section in enumerate(sections, 1)
    )
    template = Template(resources.files("pyramidsd.tools").joinpath("page.html").read_text("utf-8"))
    return template.substitute(title=_text(title), body=body)


def _text(value: object) -> str:
    """Escaped for HTML; control characters as their pictures, halves of surrogate pairs as the sign for nonsense."""
    return escape("".join(map(_printable, str(value))))


def _printable(letter: str) -> str:
    code = ord(letter)
    if code < 32 and letter not in "\n\t":
        return chr(0x2400 + code)
    return "\ufffd" if 0xD800 <= code < 0xE000 or 0x7F <= code < 0xA0 else letter


def _section(section: Section, number: int) -> str:
    target = section.entries[0].levels[-1]
    figures = "\n".join(
        f"<figure{' class=pair' if len(drawing.charts) > 1 else ''}><h3>{_text(drawing.title)}</h3>\n"
        f'<div class="charts">{"".join(drawing.charts)}</div>\n'
        f"<figcaption>{_text(drawing.caption)}</figcaption></figure>"
        for drawing in section.drawings
    )
    missing = "".join(f'<p class="muted">{_text(line)}</p>' for line in section.missing)
    return "\n".join(
        [
            f"<h2>Target {_text(target)}</h2>",
            _lead(section.entries),
            *(_facts(part) for part in section.parts),
            "<h3>All settings</h3>",
            _table(section.entries),
            "<h3>What differs from plain decoding</h3>",
            _verdicts(section.entries),
            f'<div class="figures">{figures}</div>' if figures else "",
            missing,
            _time_table(timed(section.entries)),
            _answers(section, number),
        ]
    )


def _lead(entries: Sequence[Entry]) -> str:
    """The result in a sentence or two."""
    compared = [e for e in entries if e.row["paired"] is not None and not _is_plain(e)]
    if not compared:
        return (
            '<p class="lead">Nothing here is compared with plain decoding: it was not run beside another setting.</p>'
        )
    best = max(compared, key=lambda entry: float(entry.row["paired"]))
    row = best.row
    sure = {True: "", False: ", which cannot be told apart from plain decoding", None: " (too few answers to be sure)"}
    between = "" if row["interval"] is None else " (95 %: {:.2f} to {:.2f})".format(*row["interval"])
    loss = "" if row["deviation"] is None else f", at a mean deviation of {_deviation(row['deviation'])} per token"
    return (
        f'<p class="lead">The fastest setting, <b>{_text(best.name)}</b>, runs at <b>{row["paired"]:.2f} times</b> the '
        f"speed of plain decoding{between}{sure[row['differs']]}{loss}.</p>"
    )


def _is_plain(entry: Entry) -> bool:
    """Whether it is what the others are compared with: it is only ever as fast as itself."""
    return entry.row["paired"] == 1 and entry.row["interval"] in (None, (1, 1)) and "plain" in entry.row["method"]


def _facts(part: Part) -> str:
    run, prompts = part.runs[-1], part.runs[-1].get("prompts", {})
    machine = run.get("machine", {})
    commits = dict.fromkeys(str(line.get("commit") or "of an installed package") for line in part.runs)
    answers, rounds = len(part.answers), len({answer["round"] for answer in part.answers})
    files = prompts.get("files") or [prompts.get("file")]
    asked = f"{prompts.get('count')} from {', '.join(map(str, files))} (digest {prompts.get('digest')})"
    facts = {
        "record": part.name,
        "prompts": f"{asked}; {answers} answers in {rounds} {'rounds' if rounds > 1 else 'round'}",
        "answers": f"at most {run.get('max_new_tokens')} tokens a turn; {_sampling(part.settings)}",
        "models": "; ".join(dict.fromkeys(" → ".join(setting["models"]) for setting in part.settings)),
        "numbers": f"{run.get('dtype')} on {machine.get('device')}, {machine.get('threads')} threads",
        "system": machine.get("system"),
        "versions": ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()),
        "commit": ", then ".join(commits),
        "started": ", again ".join(dict.fromkeys(str(line.get("started")) for line in part.runs)),
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items()) + "</dl>"


def _sampling(settings: Sequence[Line]) -> str:
    """How tokens were drawn, for every way there is."""
    ways = [setting.get("sampling", {}) for setting in settings]
    said = [
        "greedy" if not way.get("temperature") else ", ".join(f"{key} {value}" for key, value in way.items() if value)
        for way in ways
    ]
    return "; ".join(dict.fromkeys(said))


def _deviation(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _between(pair: Iterable[float] | None) -> str:
    return "too few" if pair is None else "{:.2f} to {:.2f}".format(*pair)


def _rows(head: Sequence[str], body: Sequence[Sequence[str]], caption: str, name: str) -> str:
    """A table whose first column names the rows. Cells are HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>\n"
        for first, *rest in body
    )
    table = f"<table><thead><tr>{top}</tr></thead>\n<tbody>{lines}</tbody></table>"
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'
    return f'{box}<p class="muted">{caption}</p>'


def _table(entries: Sequence[Entry]) -> str:
    body = [
        [
            _text(entry.name),
            _number(row["tokens_per_second"]),
            _between(row["quartiles"]),
            _number(row["paired"]),
            "-" if row["paired"] is None else "" if _is_plain(entry) else _between(row["interval"]),
            _number(row["speedup_over_plain"]),
            _number(row["tokens_per_target_pass"]),
            " ".join(map(_number, row["acceptance"])) or "-",
            _deviation(row["deviation"]),
            _deviation(row["worst_deviation"]),
            "-" if row["same_as_plain"] is None else f"{row['same_as_plain']:.0%}",
            str(row["answers"]),
        ]
        for entry in entries
        for row in [entry.row]
    ]
    head = (
        "setting",
        "tokens/s",
        "quartiles",
        "over plain",
        "95 %",
        "mean ratio",
        "per target pass",
        "acceptance",
        "deviation",
        "worst",
        "same as plain",
        "answers",
    )
    caption = (
        "tokens/s: median over answers. Over plain: median of the ratios of speeds to the same prompt in the same "
        "round, with the 95 % interval of that median. Mean ratio: mean tokens/s over that of plain decoding, as in "
        "Spec-Bench. "
        "Acceptance: per boundary, lowest first. Deviation: total variation between the law a token was drawn from and "
        "the target's, 0 to 1; mean and worst. Same as plain: answers that agree token by token."
    )
    return _rows(head, body, caption, "All settings")


def _verdicts(entries: Sequence[Entry]) -> str:
    """What the intervals say, setting by setting."""
    compared = [entry for entry in entries if entry.row["paired"] is not None and not _is_plain(entry)]
    if not compared:
        return "<p>Plain decoding was not run beside the other settings, so nothing can be said.</p>"
    groups = {"faster": [], "slower": [], "not told apart": [], "too few": []}  # type: dict[str, list[str]]
    for entry in compared:
        row = entry.row
        kind = (
            "too few"
            if row["differs"] is None
            else "not told apart"
            if not row["differs"]
            else "faster"
            if row["paired"] > 1
            else "slower"
        )
        groups[kind].append(_text(entry.label))
    said = {
        "faster": "Faster",
        "slower": "Slower",
        "not told apart": "Cannot be told apart from plain decoding",
        "too few": "Too few answers to tell (an interval at 95 % takes 6)",
    }
    lines = "".join(f"<li><b>{said[kind]}</b>: {'; '.join(names)}</li>" for kind, names in groups.items() if names)
    note = (
        f'<p class="muted">Each of the {len(compared)} intervals has its own 5 % chance to miss, so with many '
        "settings a few differ by luck.</p>"
        if len(compared) > 9
        else ""
    )
    return f"<ul>{lines}</ul>{note}"


def _time_table(entries: Sequence[Entry]) -> str:
    body = []
    for entry in entries:
        row = entry.row
        per_model = [
            f"{_text(model)} {share:.0%}" + (f", {1000 * seconds:.3g} ms" if seconds else "")
            for model, share, seconds in zip(
                row["models"], row["forward_share"], row["seconds_per_forward"], strict=True
            )
        ]
        size = "-" if row["megabytes"] is None else f"{row['megabytes']:.0f}"
        body.append([_text(entry.name), "; ".join(per_model), f"{row['overhead']:.1%}", size])
    head = ("setting", "share of the time and milliseconds per forward, lowest level first", "outside", "weights, MB")
    return "<h3>Time per level</h3>" + _rows(
        head, body, "Outside: share of the wall time outside the forwards of models.", "Time per level"
    )


def _answers(section: Section, number: int) -> str:
    if not section.shown:
        return ""
    all_models = models(section.entries)
    classes = {model: f"o{i % 6}" for i, model in enumerate(all_models[:-1])} | {all_models[-1]: "ot"}
    key = "".join(f'<li><span class="t {classes[name]}">&nbsp;{_text(name)}&nbsp;</span></li>' for name in all_models)
    steps = "".join(
        f'<li><span class="t d{i}">&nbsp;{"above" if i else "exactly"} {bound:g}&nbsp;</span></li>'
        for i, bound in [(0, 0.0), *enumerate(DEVIATIONS, 1)]
    )
    most = max(section.shown, key=lambda shown: fmean(shown[1]["deviation"]))
    views = "\n".join(_answer(shown, classes, f"a{number}-{i}", shown is most) for i, shown in enumerate(section.shown))
    return (
        "<h3>Answers, token by token</h3>\n<p>The background is the model that first proposed a token, the line under "
        "it the deviation of its law from the target's. Point at a token, touch it or move to it for the figures.</p>\n"
        f'<ul class="key" aria-label="Models">{key}</ul>\n<ul class="key" aria-label="Deviation">{steps}</ul>\n'
        '<ul class="key muted t" aria-label="Signs"><li><i class="n"></i> line break</li><li><i class="b"></i> tab</li>'
        f'<li><i class="e"></i> no text of its own</li></ul>\n{views}'
    )


def _answer(shown: tuple[Entry, Line], classes: Mapping[str, str], anchor: str, is_open: bool) -> str:
    entry, line = shown
    tokens = list(zip(line["pieces"], line["origin"], line["deviation"], strict=True))
    cut = tokens[:MOST_TOKENS]
    spans = "".join(
        _token(i, piece, entry.levels[level], value, classes) for i, (piece, level, value) in enumerate(cut, 1)
    )
    more = f" Only the first {MOST_TOKENS} are shown." if len(tokens) > MOST_TOKENS else ""
    counts = ", ".join(
        f"{sum(origin == level for _, origin, _ in tokens)} by {name}" for level, name in enumerate(entry.levels)
    )
    worst = sorted((token for token in tokens if token[2] > 0), key=lambda token: -token[2])[:5]
    listed = "; ".join(f"{_quoted(piece)} {value:.2f}" for piece, _, value in worst)
    largest = f" Largest: {listed}." if worst else ""
    mean = fmean(value for _, _, value in tokens)
    return (
        f"<details{' open' if is_open else ''}><summary>{_text(entry.name)}</summary>\n"
        f'<p class="muted">Answer to prompt {_text(line["prompt"])}, round {_text(line["round"])}: '
        f"{len(tokens)} tokens, {_text(counts)}. Mean deviation {_deviation(mean)}.{largest}{more} "
        f'<a class="skip" href="#{anchor}">Skip the tokens</a></p>\n'
        f'<div class="tok" translate="no">{spans}</div><span id="{anchor}"></span></details>'
    )


def _quoted(piece: str) -> str:
    return f"&ldquo;{_text(shortened(piece.strip(), 20))}&rdquo;" if piece.strip() else "a token without letters"


def _token(position: int, piece: str, model: str, deviation: float, classes: Mapping[str, str]) -> str:
    """One token. Those that deviate can be reached by the tab key, the others only by touch: there are too many."""
    step = sum(deviation > bound for bound in DEVIATIONS)
    marked = _text(piece).replace("\n", '<i class="n"></i>\n').replace("\t", '<i class="b"></i>\t')
    return (
        f'<span class="t {classes[model]}{f" d{step}" if step else ""}" tabindex="{0 if step else -1}" '
        f'title="{position}: {_text(model)}, deviation {_deviation(deviation)}">{marked or "<i class=e></i>"}</span>'
    )
