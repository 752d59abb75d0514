"""The figures of a report, drawn by matplotlib: as SVG that follows the colours of the page, and as PNG.

Figures are as wide as a phone, so that no text has to shrink. Colours are stand-ins: in SVG each becomes a CSS variable
of the page, which has a light and a dark value for it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox

from pyramidsd.tools.views import Bar, Curve, Point

Chart = Figure
"""The type by which files that do not import matplotlib name a figure."""

WIDTH = 3.75  # inches: 360 CSS pixels
FONT = 8.2  # points: 11 CSS pixels at that width

INK, MUTED, GRID, PAPER, ON_FILL = "#1c2129", "#57606b", "#d5dbe2", "#fffffe", "#fefefe"
TARGET, REST = "#4a5561", "#b4bcc5"
SERIES = ("#0064a2", "#b34a00", "#007a5a", "#9a3b82", "#7a6300", "#1f7585")
"""Told apart by most kinds of colour vision, each at least 4.5 : 1 on white; shapes and dashes go with them."""

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    ON_FILL: "on-fill",
    TARGET: "target",
    REST: "rest",
    **{colour: f"c{i}" for i, colour in enumerate(SERIES)},
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pyramidsd",
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, and is wider than the fonts a browser may put in its place
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.parse_math": False,  # names may hold dollar signs
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.dpi": 200,
}


@contextmanager
def drawing() -> Iterator[None]:
    """The style of all figures. Letters that matplotlib's font lacks are no reason to speak: browsers have them."""
    style: dict[Any, Any] = {**mpl.rcParamsDefault, **_STYLE}  # whatever a matplotlibrc says
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an element of an HTML page: no header, no addresses, colours by variable, unique ids.

    Args:
        name: goes before every id, so that several figures fit one page.
        description: what a screen reader says.
    """
    file = io.StringIO()
    with drawing():
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: _identity(found[1], name, used), text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg {box[0] if box else ""} class="chart" role="img" aria-label="{_attribute(description)}">'
    return re.sub(r"^<svg[^>]*>", lambda _: head, text)


def _identity(identity: str, name: str, used: set[str]) -> str:
    if identity.startswith("mark:"):
        return f' data-mark="{identity[5:]}"'
    return f' id="{name}-{identity}"' if identity in used else ""


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def png(figure: Figure, path: Path) -> None:
    """Write the figure on white.

    Raises:
        OSError: it cannot be written.
    """
    with drawing():
        figure.savefig(path, format="png", facecolor="white", metadata={"Software": ""})


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Figure, sides: tuple[float, float, float, float]) -> Axes:
    """Axes with so many points free at the left, bottom, right and top."""
    width, height = figure.get_size_inches() * 72
    left, bottom, right, top = sides
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )


def _above(axes: Axes, text: str) -> None:
    """The name of the y axis, where it is read without turning the head."""
    axes.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-axes.get_position().x0 * WIDTH * 72 + 2, 7),
        textcoords="offset points",
        color=MUTED,
        va="bottom",
    )


def _key(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> float:
    """Rows of marker and name along the top edge; the height they take, in points."""
    width, height = figure.get_size_inches() * 72
    x, y = 3.0, height - 8.0
    for text, colour, marker in entries:
        drawn = figure.text((x + 9) / width, y / height, text, va="center", color=INK)
        extent = drawn.get_window_extent(figure.canvas.get_renderer()).width * 72 / figure.dpi  # type: ignore[attr-defined]
        if x > 3 and x + 9 + extent > width:
            x, y = 3.0, y - 13
            drawn.set_position(((x + 9) / width, y / height))
        dot = Line2D([(x + 3) / width], [y / height], color=colour, marker=marker, markersize=5, lw=0)
        figure.add_artist(dot)
        x += 9 + extent + 10
    return float(height - y + 9)


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in order; past the sixth they repeat."""
    return {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}


def _model_colours(models: Sequence[str]) -> dict[str, str]:
    """As `_colours`, with a grey of its own for the target, which comes last."""
    return _colours(models[:-1]) | {models[-1]: TARGET}


def speed_and_deviation(points: Sequence[Point], unit: str) -> Figure:
    """Speed against deviation: the front as steps, baselines as lines across, intervals as bars."""
    figure = _figure(3.5)
    methods = list(dict.fromkeys(point.method for point in points if point.deviation is not None))
    colour, marker = _colours(methods), dict(zip(methods, _MARKERS * 3, strict=False))
    top = _key(figure, [(method, colour[method], marker[method]) for method in methods])
    axes = _axes(figure, (34, 30, 10, top + 20))
    placed = [point for point in points if point.deviation is not None]
    right = max(point.deviation or 0 for point in placed) * 1.06
    axes.set_xlim(-0.03 * right, right)
    bounds = [bound for point in points for bound in (*(point.interval or ()), point.speed)]
    margin = 0.09 * (max(bounds) - min(bounds) or 1)
    axes.set_ylim(max(0, min(bounds) - margin), max(bounds) + margin)
    axes.set_xlabel("mean deviation per token (total variation, 0 to 1)")
    axes.locator_params(nbins=5)
    _above(axes, unit)
    for point in points:
        if point.deviation is None or point.method == "plain":
            line = axes.axhline(point.speed, color=MUTED, lw=0.8, ls=(0, (4, 2)), zorder=1)
            line.set_gid(f"mark:line:{point.name}")
    front = sorted((p for p in placed if p.on_front), key=lambda p: (p.deviation or 0, p.speed))
    axes.step(
        [*(p.deviation or 0 for p in front), right],
        [*(p.speed for p in front), front[-1].speed],
        where="post",
        color=INK,
        lw=1,
        zorder=2,
        gid="mark:front",
    )
    for point in placed:
        _draw_point(axes, point, colour[point.method], marker[point.method])
    _label(axes, points)
    return figure


def _draw_point(axes: Axes, point: Point, colour: str, marker: str) -> None:
    x = [point.deviation or 0]
    if point.interval is not None:
        bar = axes.vlines(x, *point.interval, colors=colour, lw=1.2 if point.on_front else 0.7, zorder=3)
        bar.set_alpha(1 if point.on_front else 0.45)
        bar.set_gid(f"mark:interval:{point.name}")
    axes.plot(
        x,
        [point.speed],
        marker=marker,
        markersize=5.5 if point.on_front else 4,
        color=colour,
        markerfacecolor=colour if point.on_front else PAPER,
        markeredgewidth=1,
        zorder=4,
        clip_on=False,
        gid=f"mark:point:{point.name}",
    )


_OFFSETS = [
    (dx * step, dy * step)
    for step in (1, 2, 3, 4)
    for dx, dy in ((7, 0), (0, 8), (7, 8), (7, -8), (0, -8), (-7, 8), (-7, -8), (-7, 0))
]


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Names beside the lines, the points of the front and the fastest of each method, as long as there is room."""
    placed = sorted((p for p in points if p.deviation is not None), key=lambda p: not p.on_front)
    dots = [axes.transData.transform((p.deviation or 0, p.speed)) for p in placed]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in dots]
    for point in (p for p in points if p.deviation is None or p.method == "plain"):
        _label_line(axes, point, taken)
    fastest = {p.method: p for p in sorted(placed, key=lambda p: p.speed)}
    for point in (p for p in placed if p.method != "plain" and (p.on_front or fastest[p.method] is p)):
        _label_point(axes, point, taken)


def _label_line(axes: Axes, point: Point, taken: list[Bbox]) -> None:
    left, right = axes.get_xlim()
    for share, alignment in ((0.0, "right"), (0.97, "left"), (0.4, "right"), (0.6, "right")):
        for dy in (2, -9):
            anchor = (right - share * (right - left), point.speed)
            if _fits(axes, anchor, (0, dy), alignment, (point.label, MUTED), taken):
                return


def _label_point(axes: Axes, point: Point, taken: list[Bbox]) -> None:
    for dx, dy in _OFFSETS:
        alignment = "left" if dx > 0 else "right" if dx < 0 else "center"
        if _fits(axes, (point.deviation or 0, point.speed), (dx, dy - 3), alignment, (point.label, INK), taken):
            return


def _fits(
    axes: Axes,
    anchor: tuple[float, float],
    offset: tuple[float, float],
    alignment: str,
    label: tuple[str, str],
    taken: list[Bbox],
) -> bool:
    """Write a label there, unless it would leave the axes or cover something; far ones get a thin line."""
    text, colour = label
    far = max(map(abs, offset)) > 14
    note = axes.annotate(
        text,
        anchor,
        xytext=offset,
        textcoords="offset points",
        ha=alignment,
        va="baseline",
        color=colour,
        arrowprops={"arrowstyle": "-", "color": MUTED, "lw": 0.5, "shrinkA": 0, "shrinkB": 3} if far else None,
        zorder=5,
        bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
    )
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    note.update_positions(renderer)
    box = Text.get_window_extent(note, renderer)
    inside = axes.bbox.padded(3)
    if box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1 + 6:
        note.remove()
        return False
    if any(box.overlaps(other) for other in taken):
        note.remove()
        return False
    taken.append(box)
    return True


def heat_map(
    cells: Mapping[tuple[float, float], float | None], names: tuple[str, str], digits: int, shades: str
) -> Figure:
    """A table of cells keyed by column and row, whose shade follows the value written in it.

    Args:
        names: of the columns and of the rows.
        digits: after the point.
        shades: a colour map from light to dark.
    """
    columns, rows = (sorted({key[i] for key in cells}) for i in (0, 1))
    figure = _figure((66 + 24 * len(rows)) / 72)
    axes = _axes(figure, (40, 32, 6, 22))
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, len(rows))
    axes.set_xticks([i + 0.5 for i in range(len(columns))], [f"{value:g}" for value in columns])
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [f"{value:g}" for value in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(names[0])
    _above(axes, names[1])
    values = [value for value in cells.values() if value is not None]
    low, high = min(values), max(values)
    scale = mpl.colormaps[shades]
    for i, column in enumerate(columns):
        for j, row in enumerate(rows):
            value = cells.get((column, row))
            # The ends of the maps are too near to the paper and to black to carry text of either colour.
            share = 0.5 if value is None or high == low else (value - low) / (high - low)
            fill = PAPER if value is None else to_hex(scale(0.12 + 0.76 * share))
            axes.add_patch(
                Rectangle((i + 0.03, j + 0.04), 0.94, 0.92, facecolor=fill, gid=f"mark:cell:{column:g},{row:g}")
            )
            text = "-" if value is None else f"{value:.{digits}f}"
            colour = MUTED if value is None else _readable(fill)
            axes.text(i + 0.5, j + 0.47, text, ha="center", va="center", color=colour)
    return figure


def _readable(fill: str) -> str:
    """Black or white, whichever has more contrast (WCAG 2)."""
    channels = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in to_rgb(fill)]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    return "#111111" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The values moved as little as a simple sweep can, so that neighbours are `gap` apart inside the bounds."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    moved = list(values)
    floor = low
    for i in order:
        moved[i] = floor = max(moved[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= gap
    return moved


def acceptance(curves: Sequence[Curve]) -> Figure:
    """The share of drafts kept up to each position, one curve per setting, named at its end."""
    height = max(2.3, 0.9 + 0.17 * len(curves))
    figure = _figure(height)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    probes = [figure.text(0, 0, curve.label) for curve in curves]
    widest = max(probe.get_window_extent(renderer).width for probe in probes) * 72 / figure.dpi
    for probe in probes:
        probe.remove()
    axes = _axes(figure, (30, 30, min(widest + 16, WIDTH * 72 * 0.6), 24))
    longest = max(len(curve.shares) for curve in curves)
    axes.set_ylim(0, 1)
    axes.set_xlim(0.7, longest + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.grid(True)
    axes.set_axisbelow(True)
    axes.set_xlabel("position in the draft")
    _above(axes, "share of drafts kept up to here")
    ends = _spread([curve.shares[-1] for curve in curves], 11.5 / (72 * height - 54), 0.01, 0.99)
    for i, (curve, end) in enumerate(zip(curves, ends, strict=True)):
        colour = SERIES[i % len(SERIES)]
        axes.plot(
            range(1, len(curve.shares) + 1),
            curve.shares,
            color=colour,
            ls=_DASHES[i % len(_DASHES)],
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=4,
            lw=1.2,
            clip_on=False,
            gid=f"mark:curve:{curve.name}",
        )
        edge = longest + 0.3
        axes.plot([len(curve.shares), edge], [curve.shares[-1], end], color=colour, lw=0.5, clip_on=False)
        axes.annotate(
            curve.label,
            (edge, end),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
    return figure


def entropies(samples: Mapping[str, Sequence[float]], models: Sequence[str], bins: int = 24) -> Figure:
    """How sure each model is: a histogram of the entropy of its laws over positions, with the mean marked."""
    figure = _figure(0.45 + 1.15 * len(samples))
    colour = _model_colours(models)
    longest = max(max(values) for values in samples.values()) or 1.0
    edges = [longest * i / bins for i in range(bins + 1)]
    height, room = figure.get_size_inches()[1] * 72, 83
    shares = {name: [count / len(values) for count in _counts(values, edges)] for name, values in samples.items()}
    top = max(max(column) for column in shares.values())
    for i, (name, values) in enumerate(samples.items()):
        axes = _axes(figure, (32, height - room * (i + 1) + 4, 8, room * i + 26))
        axes.bar(
            edges[:-1],
            shares[name],
            width=longest / bins * 0.92,
            align="edge",
            color=colour[name],
            gid=f"mark:histogram:{name}",
        )
        axes.set_xlim(0, longest)
        axes.set_ylim(0, top * 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.locator_params(axis="y", nbins=3)
        mean = sum(values) / len(values)
        axes.axvline(mean, color=INK, lw=1, gid=f"mark:mean:{name}")
        late = mean > 0.6 * longest
        axes.annotate(
            f"mean {mean:.2f}",
            (mean, top),
            xytext=(-3 if late else 3, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
        )
        _above(axes, f"{name}: share of {len(values)} positions")
        if i < len(samples) - 1:
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("entropy of the next-token law (nats)")
    return figure


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many values lie between neighbouring edges; the last edge belongs to the last bin."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(int(value / edges[-1] * len(counts)), len(counts) - 1)] += 1
    return counts


def time_shares(bars: Sequence[Bar], models: Sequence[str]) -> Figure:
    """Where the wall time of each setting goes, as stacked bars from 0 to all of it."""
    figure = _figure((62 + 31 * len(bars) + 13 * (len(models) // 3)) / 72)
    colour = _model_colours(models)
    top = _key(figure, [*((name, colour[name], "s") for name in models), ("outside models", REST, "s")])
    axes = _axes(figure, (11, 30, 14, top))
    axes.set_xlim(0, 1)
    axes.set_ylim(len(bars), 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("share of the wall time")
    for i, bar in enumerate(bars):
        axes.text(0, i + 0.34, bar.label, va="bottom")
        start = 0.0
        for model, share in [*zip(bar.models, bar.shares, strict=True), ("", bar.rest)]:
            if share <= 0:
                continue
            axes.add_patch(
                Rectangle(
                    (start, i + 0.4),
                    share,
                    0.46,
                    facecolor=colour.get(model, REST),
                    edgecolor=PAPER,
                    lw=0.6,
                    gid=f"mark:bar:{bar.name}:{model}",
                )
            )
            if share > 0.11:
                axes.text(
                    start + share / 2,
                    i + 0.62,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    color=ON_FILL if model else INK,
                )
            start += share
    return figure
