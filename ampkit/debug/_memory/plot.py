"""How a memory profile is drawn: as a picture, and as a page that needs nothing else to be opened."""

import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._arguments import check_instance, check_path
from ..._text import size_text, unit_of
from .profile import CATEGORIES, MemoryProfile

# Okabe and Ito's colours, which all kinds of colour vision tell apart; neighbours in the stack differ in lightness too.
COLOURS = dict(
    zip(
        CATEGORIES,
        ("#0072B2", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#999999"),
        strict=True,
    )
)
_POINTS = 1500  # of a series that are drawn; a panel is no wider in pixels
_HOLDERS = 25  # listed on a page, per profile


def plot_memory(profile: MemoryProfile, *others: MemoryProfile, path: str | os.PathLike[str]) -> None:
    """Draw bytes alive by category over time into an image file, profiles beside each other on one scale.

    Args:
        profile: what `ampkit.debug.memory` or a forecast returned.
        others: more of them, such as the same step under another policy.
        path: of the file. Its ending says the format: `.png`, `.svg`, `.pdf`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a profile holds no events.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_memory needs matplotlib: pip install 'ampkit[plots]'") from error
    panels = _panels("plot_memory", (profile, *others))
    check_path("plot_memory", "path", path)
    figure = Figure(figsize=(1.8 + 5.8 * len(panels), 4.6), dpi=130, layout="constrained")
    scale = _Scale.over(panels)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw(axes, panel, scale)
        axes.set_ylim(0, scale.top / scale.unit)
        axes.yaxis.set_tick_params(labelleft=True)
    figure.axes[0].set_ylabel(f"memory alive, {scale.name}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)  # the topmost first
    figure.savefig(path)


def memory_page(profile: MemoryProfile, *others: MemoryProfile, path: str | os.PathLike[str]) -> None:
    """Write one HTML page: timelines that tell under the pointer what is alive, the table at the peak, largest holders.

    The page loads nothing: it can be mailed, kept with a run, and opened on a machine without a network.

    Args:
        profile: what `ampkit.debug.memory` or a forecast returned.
        others: more of them, shown beside the first on one scale.
        path: of the file.

    Raises:
        ValueError: a profile holds no events.
    """
    panels = _panels("memory_page", (profile, *others))
    check_path("memory_page", "path", path)
    scale = _Scale.over(panels)
    title = "Memory of " + ", ".join(map(_title, panels))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<div class="panels">{"".join(_figure(panel, scale) for panel in panels)}</div>',
        "<h2>At the peak</h2>",
        _peak_table(panels),
        "<h2>Largest holders at the peak</h2>",
        f'<div class="panels">{"".join(map(_holder_table, panels))}</div>',
    ]
    page = _PAGE.replace("TITLE", html.escape(title)).replace("BODY", "\n".join(body))
    Path(path).write_text(page, encoding="utf-8")


# ---------------------------------------------------------------------------------------------- what both of them draw


class _Line(NamedTuple):
    """A mark: where it is, what it says (nothing where there is no room), and whether a step begins."""

    x: float
    text: str
    step: bool


class _Panel(NamedTuple):
    """One profile, thinned out to what can be seen."""

    profile: MemoryProfile
    kept: list[int]
    x: list[float]
    x_label: str
    series: dict[str, list[int]]
    lines: list[_Line]
    peak: int
    peak_at: int
    peak_x: float


class _Scale(NamedTuple):
    """The axis that panels share: bytes of its end, of its unit, the unit's name, what has any bytes at all."""

    top: float
    unit: int
    name: str
    categories: list[str]

    @classmethod
    def over(cls, panels: Sequence[_Panel]) -> "_Scale":
        peak = max(panel.peak for panel in panels)
        unit, name = unit_of(peak)
        used = [category for category in CATEGORIES if any(any(panel.series[category]) for panel in panels)]
        return cls(1.16 * max(peak, 1), unit, name, used or [CATEGORIES[0]])  # with room for what stands over the peak


def _panels(caller: str, profiles: Sequence[MemoryProfile]) -> list[_Panel]:
    for profile in profiles:
        check_instance(caller, "profile", profile, MemoryProfile, "what ampkit.debug.memory or forecast returned")
        if not profile.times_ms:
            raise ValueError(f"{caller}: profile {profile.label!r} holds no events. Record at least one step.")
    return [_panel(profile) for profile in profiles]


def _panel(profile: MemoryProfile) -> _Panel:
    # The times of a forecast are those of a host that computes shapes: they say nothing about the step.
    along = range(len(profile.times_ms)) if profile.forecast else profile.times_ms
    totals = profile.totals
    kept = _kept(totals, _POINTS)
    peak = max(totals)
    peak_at = totals.index(peak)
    return _Panel(
        profile=profile,
        kept=kept,
        x=[along[i] for i in kept],
        x_label="allocations and frees, in order" if profile.forecast else "time, ms",
        series={category: [profile.series[category][i] for i in kept] for category in CATEGORIES},
        lines=list(_lines(profile, along)),
        peak=peak,
        peak_at=peak_at,
        peak_x=along[peak_at],
    )


def _kept(totals: Sequence[int], limit: int) -> list[int]:
    """Return which events to draw: of each of many stretches the first, the lowest and the highest; and the last."""
    if len(totals) <= limit:
        return list(range(len(totals)))
    width = math.ceil(len(totals) / ((limit - 1) // 3))
    found = {len(totals) - 1}
    for start in range(0, len(totals), width):
        stretch = range(start, min(start + width, len(totals)))
        found |= {start, min(stretch, key=totals.__getitem__), max(stretch, key=totals.__getitem__)}
    return sorted(found)


def _lines(profile: MemoryProfile, along: Sequence[float]) -> Iterator[_Line]:
    """Yield the marks. One that is too close to the next of its kind, or to the end, says nothing."""
    for is_step, room in ((True, 0.07), (False, 0.1)):
        marks = [mark for mark in profile.marks if mark.name.startswith("step ") == is_step]
        places = [along[min(mark.at, len(along) - 1)] for mark in marks]
        for mark, x, following in zip(marks, places, [*places, along[-1]][1:], strict=True):
            fits = following - x >= room * (along[-1] - along[0])
            yield _Line(x, mark.name if fits else "", is_step)


# --------------------------------------------------------------------------------------------------------- the picture


def _draw(axes: Any, panel: _Panel, scale: _Scale) -> None:
    layers = [[value / scale.unit for value in panel.series[category]] for category in scale.categories]
    colours = [COLOURS[category] for category in scale.categories]
    axes.stackplot(
        panel.x, layers, labels=scale.categories, colors=colours, step="post", edgecolor="white", linewidth=0.3
    )
    axes.set_xlim(panel.x[0], panel.x[-1] if panel.x[-1] > panel.x[0] else panel.x[0] + 1)
    axes.set_xlabel(panel.x_label)
    axes.set_title(_title(panel), fontsize=10, pad=26)
    for line in panel.lines:
        _draw_line(axes, line)
    _draw_peak(axes, panel, scale)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Any, line: _Line) -> None:
    axes.axvline(line.x, color="black", linewidth=0.8 if line.step else 0.5, linestyle="-" if line.step else ":")
    above = 13 if line.step else 3  # two rows of labels, clear of what is drawn
    axes.annotate(
        line.text,
        (line.x, 1),
        (0, above),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8 if line.step else 7,
    )


def _draw_peak(axes: Any, panel: _Panel, scale: _Scale) -> None:
    at = panel.peak_x, panel.peak / scale.unit
    left = panel.peak_x > (panel.x[0] + panel.x[-1]) / 2
    axes.plot(*at, marker="o", color="black", markersize=5, clip_on=False)
    axes.axhline(at[1], color="black", linewidth=0.5, linestyle="--")
    axes.annotate(
        f"peak {size_text(panel.peak)}",
        at,
        (-8 if left else 8, 6),
        textcoords="offset points",
        ha="right" if left else "left",
        weight="bold",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _title(panel: _Panel) -> str:
    return f"{panel.profile.label or 'memory'} on {panel.profile.device}" + (
        ", forecast" if panel.profile.forecast else ""
    )


# ------------------------------------------------------------------------------------------------------------ the page

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 36, 44


def _figure(panel: _Panel, scale: _Scale) -> str:
    """Return the timeline of one profile, with the table of what is alive and what the script reads."""
    kept = {category: panel.series[category] for category in scale.categories}
    places = [round(_across(panel, x), 2) for x in panel.x]
    data = {
        "x": places,
        "when": [_when(panel, i, x) for i, x in zip(panel.kept, panel.x, strict=True)],
        "series": list(kept.values()),
        "peak": panel.kept.index(panel.peak_at),
    }
    rows = [
        f'<tr><th><i style="background:{COLOURS[category]}"></i>{category}</th><td></td></tr>'
        for category in reversed(scale.categories)
    ]
    return (
        f"<figure><figcaption>{html.escape(_title(panel))}</figcaption>{_svg(panel, scale, places)}"
        f'<table class="now"><caption></caption>{"".join(rows)}<tr><th>all</th><td></td></tr></table>'
        f'<script type="application/json">{_json(data)}</script></figure>'
    )


def _json(data: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it can end that."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _when(panel: _Panel, event: int, x: float) -> str:
    """Return what the table says of an event: its time, the step and the phase that it belongs to."""
    begun = [mark for mark in panel.profile.marks if mark.at <= event]
    step = next((mark for mark in reversed(begun) if mark.name.startswith("step ")), None)
    phase = begun[-1] if begun and begun[-1] is not step else None
    time = f"event {event}" if panel.profile.forecast else f"{x:.3f} ms"
    return ", ".join([time, *(mark.name for mark in (step, phase) if mark)])


def _across(panel: _Panel, x: float) -> float:
    return _LEFT + (x - panel.x[0]) / ((panel.x[-1] - panel.x[0]) or 1) * (_WIDTH - _LEFT - _RIGHT)


def _up(scale: _Scale, number: float) -> float:
    return _HEIGHT - _BOTTOM - number / scale.top * (_HEIGHT - _TOP - _BOTTOM)


def _svg(panel: _Panel, scale: _Scale, places: Sequence[float]) -> str:
    parts = [*_grid(panel, scale), *_areas(panel, scale, places)]
    for line in panel.lines:
        x, kind = _across(panel, line.x), "step" if line.step else "phase"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        y = _TOP - (20 if line.step else 5)  # two rows of labels, clear of what is drawn
        parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y}">{html.escape(line.text)}</text>')
    parts += _peak(panel, scale)
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    label = html.escape(f"{_title(panel)}: bytes alive by category, peak {size_text(panel.peak)}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _areas(panel: _Panel, scale: _Scale, places: Sequence[float]) -> Iterator[str]:
    """Yield one area per category, each on those before."""
    below = [0] * len(places)
    for category in scale.categories:
        above = [low + value for low, value in zip(below, panel.series[category], strict=True)]
        there, back = _steps(scale, places, above), _steps(scale, places, below)[::-1]
        points = " ".join(f"{x:g},{y:.1f}" for x, y in there + back)
        yield f'<polygon fill="{COLOURS[category]}" points="{points}"><title>{category}</title></polygon>'
        below = above


def _steps(scale: _Scale, places: Sequence[float], values: Sequence[int]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps each value until the next."""
    heights = [_up(scale, value) for value in values]
    corners = [(places[0], heights[0])]
    for x, old, new in zip(places[1:], heights[:-1], heights[1:], strict=True):
        corners += [(x, old), (x, new)] if old != new else []
    return [*corners, (places[-1], heights[-1])]


def _grid(panel: _Panel, scale: _Scale) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in _ticks(scale.top / scale.unit):
        y = _up(scale, value * scale.unit)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>'
    for value in _ticks(panel.x[-1] - panel.x[0]):
        yield f'<text class="x" x="{_across(panel, panel.x[0] + value):.1f}" y="{bottom + 16}">{value:g}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="x" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}">{panel.x_label}</text>'
    yield f'<text class="x" transform="translate(16 {middle}) rotate(-90)">memory alive, {scale.name}</text>'


def _ticks(end: float) -> list[float]:
    """Return round numbers from 0 up to `end`, four to eight of them."""
    if end <= 0:
        return [0]
    power = 10.0 ** math.floor(math.log10(end / 4))
    distance = next(step * power for step in (1, 2, 5, 10) if end / (step * power) < 8)
    return [float(f"{i * distance:.12g}") for i in range(int(end / distance) + 1)]


def _peak(panel: _Panel, scale: _Scale) -> Iterator[str]:
    x, y = _across(panel, panel.peak_x), _up(scale, panel.peak)
    left = x > _WIDTH / 2
    place = f'x="{x + (-8 if left else 8):.1f}" y="{y - 7:.1f}" text-anchor="{"end" if left else "start"}"'
    yield f'<line class="phase" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/><text class="peak" {place}>peak {size_text(panel.peak)}</text>'


def _peak_table(panels: Sequence[_Panel]) -> str:
    """Return the table of all categories at the peak, of the second profile and further ones also as a share."""
    peaks = [{**panel.profile.at_peak, "all": panel.peak} for panel in panels]
    heads = "".join(f"<th>{html.escape(_title(panel))}</th>" for panel in panels)
    rows = []
    for name in [*(name for name in CATEGORIES if any(peak[name] for peak in peaks)), "all"]:
        first = peaks[0][name]
        cells = [size_text(first), *(size_text(peak[name]) + _share(peak[name], first) for peak in peaks[1:])]
        rows.append(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _share(number: int, of: int) -> str:
    return f" ({number / of:.0%})" if of else ""


def _holder_table(panel: _Panel) -> str:
    holders = panel.profile.holders[:_HOLDERS]
    heads = "".join(f"<th>{head}</th>" for head in ("bytes", "category", "module", "shape, dtype", "line"))
    rows = []
    for holder in holders:
        shape = f"{tuple(holder.shape)} {holder.dtype}"
        texts = (holder.category, holder.module, shape, holder.line)
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        rows.append(f'<tr><td class="bytes">{size_text(holder.bytes)}</td>{cells}</tr>')
    hidden = len(panel.profile.holders) - len(holders)
    more = f"<caption>{hidden} more are not listed</caption>" if hidden else ""
    caption = f"<figcaption>{html.escape(_title(panel))}</figcaption>"
    return f'<figure>{caption}<table class="holders">{more}<tr>{heads}</tr>{"".join(rows)}</table></figure>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 1.6em }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); gap: 1.5em }
figure { margin: 0; min-width: 0; overflow-x: auto } figcaption { font-weight: 600; margin-bottom: .3em }
svg { width: 100%; font-size: 12px; touch-action: none }
svg .grid { stroke: #ddd } svg .step { stroke: #000; stroke-width: .8 }
svg .phase { stroke: #000; stroke-width: .5; stroke-dasharray: 2 2 } svg .cursor { stroke: #000; visibility: hidden }
svg text, svg text.step, svg text.phase { stroke: none } svg text.y { text-anchor: end }
svg text.x { text-anchor: middle } svg text.phase { font-size: 10px }
svg text.peak { font-weight: 700; paint-order: stroke; stroke: #fff; stroke-width: 3px }
table { border-collapse: collapse } caption { text-align: left; color: #555 }
th, td { padding: .15em .8em .15em 0; text-align: left; font-weight: 400; vertical-align: top }
tr:last-child th, tr:last-child td { font-weight: 600 }
table:not(.holders) td, td.bytes { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
table.holders td { font-size: 12px } table.holders tr:last-child td { font-weight: 400 }
table i { display: inline-block; width: .9em; height: .9em; margin-right: .5em }
</style>
</head>
<body>
BODY
<script>
"use strict";
const size = (number) => {
  for (const [unit, name, digits] of [[2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1]])
    if (number >= unit) return (number / unit).toFixed(digits) + " " + name;
  return number + " B";
};
for (const panel of document.querySelectorAll("figure:has(svg)")) {
  const data = JSON.parse(panel.querySelector("script").textContent);
  const svg = panel.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const caption = panel.querySelector("caption"), cells = [...panel.querySelectorAll(".now td")].reverse();
  const show = (i, hovered) => {
    const values = data.series.map((series) => series[i]);
    cells[0].textContent = size(values.reduce((sum, value) => sum + value, 0));
    values.forEach((value, k) => { cells[k + 1].textContent = size(value); });
    caption.textContent = (hovered ? "at " : "at the peak, ") + data.when[i];
    cursor.setAttribute("x1", data.x[i]);
    cursor.setAttribute("x2", data.x[i]);
    cursor.style.visibility = hovered ? "visible" : "hidden";
  };
  svg.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const next = data.x.findIndex((place) => place > x);
    show(Math.max(0, (next < 0 ? data.x.length : next) - 1), true);
  });
  svg.addEventListener("pointerleave", () => show(data.peak, false));
  show(data.peak, false);
}
</script>
</body>
</html>
"""
