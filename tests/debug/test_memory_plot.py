"""Pictures and pages of memory profiles: right values at the right place, on one scale, with nothing left out."""

import builtins
import html.parser
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ampkit.debug import memory_page, plot_memory
from ampkit.debug._memory.plot_data import COLOURS, drawn_events
from ampkit.debug._memory.profile import CATEGORIES, Holder, Mark, MemoryProfile

MIB = 1 << 20


def make_profile(label: str = "float32", width: int = 2, steps: int = 2, layers: int = 30, **changes: Any) -> Any:
    """Return a profile as a training step has it: activations pile up in forward and make room for gradients."""
    draw = random.Random(5)
    alive = dict.fromkeys(CATEGORIES, 0)
    series: dict[str, list[int]] = {category: [] for category in CATEGORIES}
    marks, times = [], [0.0]

    def event(category: str, size: float) -> None:
        alive[category] += int(size)
        for name in CATEGORIES:
            series[name].append(alive[name])
        times.append(times[-1] + draw.uniform(0.01, 0.1))

    event("parameter", 90 * MIB)
    for step in range(steps):
        marks += [Mark(len(times) - 1, f"step {step}"), Mark(len(times) - 1, "forward")]
        event("input", 9 * MIB * width)
        for _ in range(layers):
            event("temporary", 14 * MIB)
            event("activation", 18 * MIB * width)
            event("temporary", -14 * MIB)
        marks.append(Mark(len(times) - 1, "backward"))
        for _ in range(layers):
            event("autograd detail", 20 * MIB * width)
            event("gradient", 3 * MIB)
            event("activation", -18 * MIB * width)
            event("autograd detail", -20 * MIB * width)
        marks.append(Mark(len(times) - 1, "optimizer"))
        if step == 0:
            event("optimizer state", 90 * MIB)
        event("gradient", -3 * MIB * layers)
        event("input", -9 * MIB * width)
    holder = Holder(18 * MIB * width, "activation", "layer1.0.conv1", "train.py:7: `y = m(x)`", (32, 64), "float32")
    profile = {
        "label": label,
        "device": "cuda:0",
        "times_ms": tuple(times[:-1]),
        "series": {category: tuple(values) for category, values in series.items()},
        "marks": tuple(marks),
        "holders": (holder,) * 40,
        "forecast": False,
    }
    return MemoryProfile(**{**profile, **changes})


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.fixture
def figure(monkeypatch):
    """The figure that `plot_memory` makes next, instead of a file."""
    from matplotlib.figure import Figure

    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: made.append(self))
    return made


@pytest.mark.slow
def test_picture_file(tmp_path):
    """P1: a PNG, higher for two profiles than for one."""
    plot_memory(make_profile(), path=tmp_path / "one.png")
    plot_memory(make_profile(), make_profile("float16", width=1), path=tmp_path / "two.png")
    (width, one), (same, two) = size_of(tmp_path / "one.png"), size_of(tmp_path / "two.png")
    assert two > 1.5 * one
    assert width == same


def test_picture_says_what_it_shows(figure):
    """P1: axes with units, one scale, a legend of what there is, the peak with its value, steps and phases."""
    left, right = make_profile(), make_profile("float16", width=1, forecast=True)
    plot_memory(left, right, path="x.png")
    first, second = figure[0].axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylabel() == "memory alive, GiB"
    assert (first.get_xlabel(), second.get_xlabel()) == ("time, ms", "allocations and frees, in order")
    assert (first.get_title(), second.get_title()) == ("float32 on cuda:0", "float16 on cuda:0, forecast")
    (legend,) = figure[0].legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == [category for category in reversed(CATEGORIES) if any(left.series[category])]
    assert "graph pool" not in named
    texts = [text.get_text() for text in first.texts]
    assert f"peak {left.peak / 2**30:.2f} GiB" in texts
    assert {"step 0", "step 1", "forward", "backward"} <= set(texts)
    (dot,) = [line for line in first.lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (left.times_ms[left.peak_at], left.peak / 2**30)


def test_picture_stacks_the_values(figure):
    """P1: the upper edge of the last layer is the total after each event."""
    profile = make_profile(layers=3, steps=1)
    plot_memory(profile, path="x.png")
    (axes,) = figure[0].axes
    corners = {(round(x, 9), round(y * 2**20)) for x, y in axes.collections[-1].get_paths()[0].vertices}
    for time, total in zip(profile.times_ms, profile.totals, strict=True):
        assert (round(time, 9), total) in corners


@pytest.mark.parametrize("limit", [10, 11, 12, 50, 400])
def test_thinning_keeps_the_extremes(limit):
    draw = random.Random(3)
    totals = [draw.randrange(1000) for _ in range(5000)]
    totals[1234], totals[4321] = 10**6, -1
    kept = drawn_events(totals, limit)
    assert len(kept) <= limit
    assert kept == sorted(set(kept))
    assert {0, 1234, 4321, 4999} <= set(kept)


def test_short_series_are_kept_whole():
    assert drawn_events([3, 1, 2], 3) == [0, 1, 2]


def test_colours_tell_apart():
    assert list(COLOURS) == list(CATEGORIES)
    assert len(set(COLOURS.values())) == len(CATEGORIES)


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: elements that are open, those that load something, texts by element."""

    VOID = ("meta",)

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.loads += [(tag, name) for name, _ in attrs if name in ("src", "href", "xlink:href", "onload", "onerror")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def data(self) -> list[Any]:
        """Return what the page's script reads, a figure each."""
        return [json.loads(text) for tag, text in self.texts if tag == "script" and text.startswith("{")]


def test_page(tmp_path):
    """P1: one file that loads nothing, with timelines beside each other, the table at the peak and the holders."""
    left, right = make_profile(), make_profile("float16", width=1)
    memory_page(left, right, path=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(tmp_path / "page.html")
    assert not page.loads
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.tags.count("svg") == 2
    cells = [data for tag, data in page.texts if tag == "td"]
    share = right.at_peak["activation"] / left.at_peak["activation"]
    assert f"{left.at_peak['activation'] / 2**30:.2f} GiB" in cells
    assert any(cell.endswith(f" ({share:.0%})") for cell in cells)
    assert cells.count("layer1.0.conv1") == 50
    assert "train.py:7: `y = m(x)`" in cells
    assert ("caption", "15 more are not listed") in page.texts


def test_page_tells_every_moment(tmp_path):
    """P1: what stands under the pointer is the category table of that event, with its time, step and phase."""
    profile = make_profile()
    memory_page(profile, path=tmp_path / "page.html")
    (data,) = Page(tmp_path / "page.html").data()
    used = [category for category in CATEGORIES if any(profile.series[category])]
    assert data["series"] == [list(profile.series[category]) for category in used]
    assert data["peak"] == profile.peak_at
    assert data["x"] == sorted(data["x"])
    assert len(data["when"]) == len(data["x"]) == len(profile.times_ms)
    assert data["when"][0] == "0.000 ms"  # before the first step
    assert data["when"][profile.peak_at] == f"{profile.times_ms[profile.peak_at]:.3f} ms, step 1, backward"


def test_page_of_a_forecast_counts_events(tmp_path):
    memory_page(make_profile(forecast=True), path=tmp_path / "page.html")
    (data,) = Page(tmp_path / "page.html").data()
    assert data["when"][1] == "event 1, step 0, forward"


def test_page_of_a_long_series_stays_small(tmp_path):
    profile = make_profile(steps=40, layers=200)
    assert len(profile.times_ms) > 50_000
    memory_page(profile, path=tmp_path / "page.html")
    (data,) = Page(tmp_path / "page.html").data()
    assert len(data["x"]) <= 1500
    assert sum(series[data["peak"]] for series in data["series"]) == profile.peak
    assert (tmp_path / "page.html").stat().st_size < 2 << 20


def test_page_escapes_what_it_is_given(tmp_path):
    evil = "</script><script>alert(1)</script><b>&amp;\"'"
    holder = Holder(5, evil, evil, evil, (1,), evil)
    profile = make_profile(label=evil, device=evil, holders=(holder,), marks=(Mark(0, "step " + evil), Mark(5, evil)))
    memory_page(profile, profile, path=tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.tags.count("script") == 3  # two figures' data, and the page's own
    assert "b" not in page.tags
    assert [data for tag, data in page.texts if tag == "td"].count(evil) == 2 * 3
    assert page.data()[0]["when"][-1].endswith(f"step {evil}, {evil}")


def test_nothing_recorded_is_refused(tmp_path):
    empty = make_profile(times_ms=(), series={category: () for category in CATEGORIES}, marks=(), label="none")
    for function in (plot_memory, memory_page):
        with pytest.raises(ValueError, match=rf"{function.__name__}: profile 'none' holds no events"):
            function(make_profile(), empty, path=tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_one_event(tmp_path):
    one = {"times_ms": (0.0,), "series": {category: (0,) for category in CATEGORIES}, "marks": (Mark(1, "step 0"),)}
    for name, function in (("x.png", plot_memory), ("x.html", memory_page)):
        function(make_profile(**one), path=tmp_path / name)
        assert (tmp_path / name).stat().st_size


def test_without_matplotlib(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'ampkit\[plots\]'"):
        plot_memory(make_profile(), path=tmp_path / "x.png")
    memory_page(make_profile(), path=tmp_path / "x.html")  # needs none
