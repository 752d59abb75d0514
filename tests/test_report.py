"""The page made of a record: what is drawn is what `summary.rows` says, and the page stands alone in a real browser."""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyramidsd.tools
from pyramidsd.cli import main
from pyramidsd.tools.records import read_record
from pyramidsd.tools.report import read_part
from pyramidsd.tools.summary import rows
from pyramidsd.tools.views import chosen, entries, front
from test_cli import refusal, save

RECIPE = """
[[run]]
methods = ["plain", "hf-plain", "hf-assisted", "nested"]
[[run]]
methods = ["sd", "fsd"]
[[run]]
methods = ["psd"]
tau_q = [0.1, 0.5]
tau_t = [0.05, 0.2, 0.4]
[[run]]
methods = ["psd"]
draft_tokens = [2, 4]
qualifier_tokens = [3, 6]
"""
LEVELS = ["layers:1", "layers:2", "model"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run of bench on a tiny model: 16 settings, 3 prompts, 2 rounds; with made-up traces."""
    folder = tmp_path_factory.mktemp("report")
    model = save(folder / "model", vocab_size=27)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "prompts.txt").write_text("abcabc\nhello\nqwerty\n")
    path = folder / "run.jsonl"
    asked = ["--target", str(model), "--draft", "layers:1", "--qualifier", "layers:2", "--temperature", "1"]
    asked += ["--recipe", str(folder / "recipe.toml"), "--prompts", str(folder / "prompts.txt")]
    assert main(["bench", *asked, "--max-new-tokens", "10", "--rounds", "2", "--record", str(path), "--json"]) == 0
    draw = Random(0)
    with path.open("a") as file:
        for prompt in "123":
            entropy = [[draw.expovariate(mean) for _ in range(50)] for mean in (0.5, 1, 2)]
            file.write(json.dumps({"kind": "trace", "prompt": prompt, "models": LEVELS, "entropy": entropy}) + "\n")
    return path


@pytest.fixture(scope="module")
def page(record, tmp_path_factory):
    return made(record, out=tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def table(record):
    lines = read_record(record)
    settings = [line for line in lines if line["kind"] == "run"][-1]["settings"]
    return rows(settings, [line for line in lines if line["kind"] == "answer"])


def made(*records, out, options=()) -> str:
    assert main(["report", *map(str, records), "--out", str(out), *options]) == 0
    return out.read_text("utf-8")


def changed(record, path: Path, change) -> Path:
    """A copy of the record; `change` gives each line's successor, or None to leave it out."""
    lines = [change(line) for line in read_record(record)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return path


class Outline(HTMLParser):
    """Tables as lists of rows of cells, and the text inside each `.tok` box."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.answers: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self._cell = self._tok = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True
        elif tag == "div" and dict(attrs).get("class") == "tok":
            self.answers.append("")
            self._tok = True

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")
        self._tok = self._tok and tag != "div"

    def handle_data(self, data):
        if self._cell:
            self.tables[-1][-1][-1] += data
        if self._tok:
            self.answers[-1] += data


def figures(page: str, heading: str) -> list[ET.Element]:
    """The SVG elements under a heading."""
    figure = next(part for part in page.split("<figure")[1:] if f"<h3>{heading}</h3>" in part)
    found = re.findall(r"<svg.*?</svg>", figure, re.DOTALL)
    return [ET.fromstring(svg.replace("xlink:href", "href")) for svg in found]


def marks(svg: ET.Element, kind: str) -> dict[str, ET.Element]:
    """The elements that draw one value each, by name."""
    found = ((element.get("data-mark", ""), element) for element in svg.iter())
    return {mark.removeprefix(kind + ":"): element for mark, element in found if mark.startswith(kind + ":")}


def spots(element: ET.Element) -> list[tuple[float, float]]:
    """Where the markers of an element are."""
    return [(float(use.get("x")), float(use.get("y"))) for use in element.iter("use")]


def corners(element: ET.Element) -> list[tuple[float, float]]:
    """The vertices of its path."""
    numbers = re.findall(
        r"[ML] (\S+) (\S+)", " ".join(path.get("d").replace("\n", " ") for path in element.iter("path"))
    )
    return [(float(x), float(y)) for x, y in numbers]


def assert_affine(values: list[float], drawn: list[float], tolerance: float = 0.02) -> None:
    """Every place on the paper, in points, is where the line through the two most distant values puts it."""
    low, high = values.index(min(values)), values.index(max(values))
    scale = (drawn[high] - drawn[low]) / (values[high] - values[low])
    assert [drawn[low] + scale * (value - values[low]) for value in values] == pytest.approx(drawn, abs=tolerance)


def test_the_table_is_the_rows(page, table):
    _, *body = Outline(page).tables[0]
    assert [line[0] for line in body] == [row["setting"] for row in table]
    for line, row in zip(body, table, strict=True):
        assert line[1] == f"{row['tokens_per_second']:.2f}"
        assert line[3] == f"{row['paired']:.2f}"
        assert line[4] == ("" if row["setting"] == "plain" else "{:.2f} to {:.2f}".format(*row["interval"]))
        assert line[5] == f"{row['speedup_over_plain']:.2f}"
        if row["deviation"] is None:
            assert line[8] == "-"
        elif row["deviation"] == 0:
            assert line[8] == "0"
        else:
            assert float(line[8].removeprefix("< ")) == pytest.approx(row["deviation"], abs=1e-3)
        assert line[-1] == "6"


def test_what_differs_is_what_the_intervals_say(page, record, table):
    found = {entry.name: entry.label for entry in entries([read_part(record)])}
    said = dict(re.findall(r"<li><b>([^<]*)</b>: (.*?)</li>", page))
    told = {kind: set(names.split("; ")) for kind, names in said.items()}
    expected: dict[str, set] = {}
    for row in table:
        if row["setting"] != "plain":
            kind = "Cannot be told apart from plain decoding"
            if row["differs"]:
                kind = "Faster" if row["paired"] > 1 else "Slower"
            expected.setdefault(kind, set()).add(found[row["setting"]])
    assert told == expected


def test_points_intervals_and_baselines_are_at_their_values(page, table):
    (svg,) = figures(page, "Speed against deviation")
    pyramids = [row for row in table if row["deviation"] is not None]
    points = marks(svg, "point")
    assert set(points) == {row["setting"] for row in pyramids}
    places = [spots(points[row["setting"]])[0] for row in pyramids]
    assert_affine([row["deviation"] for row in pyramids], [x for x, _ in places])
    values, drawn = [row["paired"] for row in pyramids], [y for _, y in places]
    for name, line in marks(svg, "line").items():
        values.append(next(row["paired"] for row in table if row["setting"] == name))
        drawn.append(corners(line)[0][1])
    for row in pyramids:
        values += row["interval"]
        drawn += sorted((y for _, y in corners(marks(svg, "interval")[row["setting"]])), reverse=True)
    assert set(marks(svg, "line")) == {"plain", "hf-plain", "hf-assisted"}
    assert_affine(values, drawn)


def test_heat_maps_hold_the_fastest_setting_of_each_cell(page, table):
    for heading, key in (("thresholds τ_Q and τ_T", "thresholds"), ("windows l_D and l_Q", "num_draft_tokens")):
        speed, deviation = figures(page, f"psd: {heading}")
        best: dict[tuple, dict] = {}
        for row in table:
            if row["method"] == "psd":
                place = tuple(row[key])
                best[place] = max(best.get(place, row), row, key=lambda r: r["paired"])
        for svg, value, digits in ((speed, "paired", 2), (deviation, "deviation", 3)):
            columns, lines = (sorted({place[axis] for place in best}) for axis in (0, 1))
            turned = len(columns) > len(lines)
            if turned:
                columns, lines = lines, columns
            texts = ["".join(text.itertext()).strip() for text in svg.iter("text")]
            order = [(column, line)[:: -1 if turned else 1] for column in columns for line in lines]
            expected = [f"{best[place][value]:.{digits}f}" if place in best else "-" for place in order]
            assert [text for text in texts if re.fullmatch(rf"-|\d+\.\d{{{digits}}}", text)][-len(order) :] == expected
            assert len(marks(svg, "cell")) == len(order)


def test_acceptance_curves_follow_the_counters(page, table):
    shown = 0
    for below, above in (("layers:1", "layers:2"), ("layers:2", "model")):
        (svg,) = figures(page, f"{above} checks {below}")
        curves = marks(svg, "curve")
        values, drawn = [], []
        for row in table:
            if row["setting"] in curves:
                i = row["models"].index(below)
                values += row["acceptance_at"][i]
                drawn += [y for _, y in spots(curves[row["setting"]])]
        assert_affine([*values, 0.0], [*drawn, _bottom(svg)])
        shown += len(curves)
    assert shown


def _bottom(svg: ET.Element) -> float:
    """The height of the line that marks 0: the lowest horizontal one."""
    flat = []
    for path in svg.iter("path"):
        ends = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d").replace("\n", " "))]
        if len(ends) == 2 and ends[0][1] == ends[1][1] and abs(ends[0][0] - ends[1][0]) > 50:
            flat.append(ends[0][1])
    return max(flat)


def test_bars_are_as_long_as_the_shares(page, record, table):
    (svg,) = figures(page, "Where the time goes")
    bars = marks(svg, "bar")
    close = {entry.name for entry in chosen(entries([read_part(record)]))}
    values, drawn = [], []
    for row in table:
        if row["setting"] in close or not row["acceptance_at"]:
            for model, share in [*zip(row["models"], row["forward_share"], strict=True), ("", row["overhead"])]:
                if share > 0:
                    xs = [x for x, _ in corners(bars.pop(f"{row['setting']}:{model}"))]
                    values.append(share)
                    drawn.append(max(xs) - min(xs))
    assert not bars
    assert_affine([*values, 0.0], [*drawn, 0.0])


def test_entropies_are_counted_and_the_mean_is_marked(page, record):
    (svg,) = figures(page, "Entropy of the models")
    traces = [line for line in read_record(record) if line["kind"] == "trace"]
    texts = ["".join(text.itertext()).strip() for text in svg.iter("text")]
    samples = {name: [v for t in traces for v in t["entropy"][i]] for i, name in enumerate(LEVELS)}
    longest = max(map(max, samples.values()))
    for name, values in samples.items():
        assert f"mean {sum(values) / len(values):.2f}" in texts
        assert f"{name}: share of 150 positions" in texts
        assert set(marks(svg, "mean")) == set(LEVELS)
    heights = []
    for element in svg.iter():
        if element.get("data-mark") == "histogram:layers:1":
            ys = [y for _, y in corners(element)]
            heights.append(max(ys) - min(ys))
    counts = [0] * 24
    for value in samples["layers:1"]:
        counts[min(int(24 * value / longest), 23)] += 1
    assert_affine([*map(float, counts), 0.0], [*heights, 0.0])


@given(st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=12))
def test_the_front_is_what_nothing_beats(pairs):
    def beaten(a):
        return any(b[0] <= a[0] and b[1] >= a[1] and b != a for b in pairs)

    assert front(pairs) == [not beaten(pair) for pair in pairs]


def test_the_answers_are_shown_to_the_letter(page, record):
    answers = [line for line in read_record(record) if line["kind"] == "answer"]
    for entry, text in zip(chosen(entries([read_part(record)])), Outline(page).answers, strict=True):
        own = [line for line in answers if line["setting"] == entry.name]
        worst = max(own, key=lambda line: sum(line["deviation"]) / len(line["deviation"]))
        assert text == "".join(worst["pieces"])


def test_hostile_text_stays_text(record, tmp_path):
    pieces = ["<script>alert(1)</script>", '"&amp;', "\n\n\tx", "\x00\x1b[31m", "", "<!--", "‮", "\ud800", "]]>", " é"]

    def hostile(line):
        if line["kind"] == "run":
            for setting in line["settings"]:
                setting["models"][-1] = '<img src=x onerror="a">$\\frac{'
        if line["kind"] == "answer" and line["origin"]:
            line["pieces"] = pieces
            line["prompt"] = "<script>" + line["prompt"]
        return line

    page = made(changed(record, tmp_path / "<b>.jsonl", hostile), out=tmp_path / "page.html")
    outline = Outline(page)
    assert not {tag for tag, _ in outline.tags} & {"script", "img", "iframe"}
    assert not [attrs for _, attrs in outline.tags if any(name.startswith("on") for name in attrs)]
    shown = "".join(pieces).replace("\x00", "␀").replace("\x1b", "␛").replace("\ud800", "\ufffd")
    assert set(outline.answers) == {shown}


def test_the_page_needs_nothing_else(page):
    for tag, attrs in Outline(page).tags:
        assert tag not in ("script", "img", "iframe", "object", "embed")
        for name in ("href", "src", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:,"))
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_the_same_record_gives_the_same_bytes(record, page, tmp_path):
    again = tmp_path / "again.html"
    command = [
        sys.executable,
        "-m",
        "pyramidsd",
        "report",
        str(record),
        "--out",
        str(again),
        "--pngs",
        str(tmp_path / "a"),
    ]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True)
    assert again.read_text("utf-8") == page
    made(record, out=tmp_path / "third.html", options=["--pngs", str(tmp_path / "b")])
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab")
    assert first == second
    assert len(first) == page.count("<svg")


def test_two_hundred_answers_stay_below_two_megabytes(record, tmp_path):
    def stretched(line):
        for key in ("token_ids", "pieces", "origin", "deviation") if line["kind"] == "answer" else ():
            line[key] = line[key] * 50
        return line

    long = changed(record, tmp_path / "long.jsonl", stretched)
    text = long.read_text()
    with long.open("a") as file:
        for round_ in "23":
            file.write(
                "".join(line + "\n" for line in text.splitlines()[1:] if '"answer"' in line).replace(
                    '"round": 1', f'"round": {round_}'
                )
            )
    assert len(made(long, out=tmp_path / "page.html")) < 2e6


def test_what_is_missing_is_said_in_a_line(record, tmp_path):
    def plain_only(line):
        return line if line["kind"] == "run" or line.get("setting") == "plain" else None

    page = made(changed(record, tmp_path / "plain.jsonl", plain_only), out=tmp_path / "page.html")
    for sentence in (
        "No figure of speed against deviation",
        "No heat map of τ_Q and τ_T",
        "No heat map of l_D and l_Q",
        "No figure of acceptance",
        "No histogram of entropies",
        "Nothing here is compared with plain decoding",
    ):
        assert page.count(sentence) == 1
    assert page.count("<svg") == 1  # where the time goes


def test_without_plain_decoding_speeds_are_tokens_per_second(record, tmp_path):
    def without(line):
        return None if line.get("setting") in ("plain", "hf-plain") else line

    page = made(changed(record, tmp_path / "r.jsonl", without), out=tmp_path / "page.html")
    (svg,) = figures(page, "Speed against deviation")
    assert "tokens/s (median, quartiles)" in ["".join(text.itertext()).strip() for text in svg.iter("text")]
    assert "Plain decoding was not run" in page


def test_records_of_one_target_share_a_section_and_others_do_not(record, table, tmp_path):
    def other(line):
        for setting in line.get("settings", ()):
            setting["models"][-1] = "another"
        return line

    twin, stranger = tmp_path / "twin.jsonl", changed(record, tmp_path / "other.jsonl", other)
    shutil.copy(record, twin)
    page = made(record, twin, stranger, out=tmp_path / "page.html")
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Target model", "Target another"]
    names = [line[0] for line in Outline(page).tables[0][1:]]
    assert len(set(names)) == len(names) == 2 * len(table)


def test_the_answer_asked_for(record, tmp_path, capsys):
    page = made(record, out=tmp_path / "page.html", options=["--answer", "2"])
    assert set(re.findall(r"Answer to prompt (\w+),", page)) == {"2"}
    capsys.readouterr()
    assert "no pyramid has an answer" in refusal(
        capsys, "report", str(record), "--out", str(tmp_path / "x"), "--answer", "9"
    )


def test_a_half_written_record_is_read_up_to_its_end(record, page, tmp_path):
    cut = tmp_path / record.name
    cut.write_text(record.read_text() + '{"kind": "answ')
    assert made(cut, out=tmp_path / "page.html") == page


BAD_LINES = {
    "no record": ("nonsense\n", "line 2 is no record"),
    "no seconds": ('{"kind": "answer", "setting": "plain"}\n', "line 2: the answer lacks prompt, round, seconds"),
    "bad trace": ('{"kind": "trace", "models": ["a"], "entropy": []}\n', "line 2: the trace must have as many lists"),
    "no answers": ("", "holds no answers yet"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_record_is_refused_by_line(case, record, tmp_path, capsys):
    text, cure = BAD_LINES[case]
    path = tmp_path / "bad.jsonl"
    path.write_text(record.read_text().split("\n")[0] + "\n" + text)
    assert cure in refusal(capsys, "report", str(path), "--out", str(tmp_path / "page.html"))


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("seconds", 0, "seconds must be a positive number"),
        ("pieces", ["a"], "differ in length"),
        ("passes", [[]], "passes must have"),
        ("stats", None, "must be lists"),
    ],
)
def test_an_impossible_answer_is_refused(key, value, cure, record, tmp_path, capsys):
    path = changed(
        record, tmp_path / "bad.jsonl", lambda line: line | {key: value} if line["kind"] == "answer" else line
    )
    assert cure in refusal(capsys, "report", str(path), "--out", str(tmp_path / "page.html"))


def test_places_that_cannot_be_read_or_written(record, tmp_path, capsys):
    assert "check the path" in refusal(capsys, "report", str(tmp_path / "nowhere"))
    assert "would overwrite the record" in refusal(capsys, "report", str(record), "--out", str(record))
    (tmp_path / "file").touch()
    for options in (
        ["--out", str(tmp_path / "file" / "page.html")],
        ["--out", "/dev/full"],
        ["--out", str(tmp_path / "page.html"), "--pngs", str(tmp_path / "file")],
    ):
        assert "cannot write" in refusal(capsys, "report", str(record), *options)


def test_without_matplotlib_the_cure_is_named(record, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(pyramidsd.tools, "charts", raising=False)
    monkeypatch.setitem(sys.modules, "pyramidsd.tools.charts", None)
    line = refusal(capsys, "report", str(record), "--out", str(tmp_path / "page.html"))
    assert "pip install 'pyramidsd[plots]'" in line


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa(page):
    """4.5 : 1 for text, 3 : 1 for marks, in both themes."""
    for scheme in re.findall(r":root \{(.*?)\}", page, re.DOTALL):
        colour = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for tint in [name for name in colour if re.fullmatch("t[0-5t]|paper|box|rest", name)]:
            assert _contrast(colour["ink"], colour[tint]) >= 4.5, tint
        for tint in [name for name in colour if re.fullmatch("t[0-5t]", name)]:
            assert _contrast(colour["dev"], colour[tint]) >= 3, tint
        for fill in [name for name in colour if re.fullmatch("c[0-5]|target", name)]:
            assert _contrast(colour["on-fill"], colour[fill]) >= 4.5, fill
            assert _contrast(colour["paper"], colour[fill]) >= 4.5, fill
        assert _contrast(colour["muted"], colour["paper"]) >= 4.5


SIZES = """() => [...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())
    .map(t => t.getBoundingClientRect().height)"""
BOXES = """() => [...document.querySelectorAll('svg.chart')].map(s => s.getBoundingClientRect())
    .map(r => [r.left, r.right])"""
CUT = """() => [...document.querySelectorAll('svg text')].filter(t => {
    const own = t.getBoundingClientRect(), all = t.closest('svg').getBoundingClientRect();
    return own.left < all.left - 1 || own.right > all.right + 1; }).map(t => t.textContent)"""
BUBBLE = "e => { const s = getComputedStyle(e, '::after'); return [s.content, s.position, s.display]; }"


@pytest.mark.browser
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(width, height, scheme, page, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the path")
    path = tmp_path / "page.html"
    path.write_text(page, "utf-8")
    requests, complaints = [], []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.context.set_offline(True)
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert min(tab.evaluate(SIZES)) >= 10
        boxes = tab.evaluate(BOXES)
        assert len(boxes) == page.count("<svg")
        assert all(0 <= left < right <= width for left, right in boxes)
        assert tab.evaluate(CUT) == []
        token = tab.locator("details[open] .t[tabindex='0']").first
        title = token.get_attribute("title")
        assert token.evaluate(BUBBLE)[0] == "none"
        token.hover()
        assert token.evaluate(BUBBLE) == [f'"{title}"', "fixed", "block"]
        tab.mouse.move(0, 0)
        assert token.evaluate(BUBBLE)[0] == "none"
        token.focus()
        assert token.evaluate(BUBBLE) == [f'"{title}"', "fixed", "block"]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        if "PYRAMIDSD_SCREENSHOTS" in os.environ:
            tab.screenshot(path=f"{os.environ['PYRAMIDSD_SCREENSHOTS']}/{width}-{scheme}.png", full_page=True)
        browser.close()
    assert requests == [path.as_uri()]
    assert complaints == []
