"""How memory profiles are written as an HTML page. It loads nothing, so it can be opened without a network."""

import html
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from ..._arguments import check_path
from ..._text import size_text
from .plot_data import COLOURS, ByteAxis, PlottedProfile, plotted_profiles
from .profile import CATEGORIES, MemoryProfile, phases_at

_HOLDERS = 25  # listed of each profile: about what fits on a screen
_WIDTH, _HEIGHT = 720, 380  # of a timeline, in the units of its SVG
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 36, 44  # margins for the labels


def memory_page(profile: MemoryProfile, *others: MemoryProfile, path: str | os.PathLike[str]) -> None:
    """Write one HTML page that shows the bytes alive in each category over time, and the largest allocations.

    Under the pointer, a timeline tells what is alive at that moment. Below, a table shows the bytes at the peak, and a
    list the largest allocations. The page loads nothing: it can be mailed, kept with a run, and opened on a machine
    without a network.

    Args:
        profile: what `ampkit.debug.memory` or `ampkit.debug.forecast` returned.
        others: further profiles, shown beside the first. All share one y axis.
        path: the file to write.

    Raises:
        ValueError: a profile holds no events.
    """
    plotted = plotted_profiles("memory_page", (profile, *others))
    check_path("memory_page", "path", path)
    axis = ByteAxis.over(plotted)
    title = "Memory of " + ", ".join(one.title for one in plotted)
    peaks = [{**one.profile.at_peak, "all": one.peak} for one in plotted]
    heads = "".join(f"<th>{html.escape(one.title)}</th>" for one in plotted)
    rows = []  # of the table of bytes at the peak; from the second profile on with the percentage of the first
    for name in [*(name for name in CATEGORIES if any(peak[name] for peak in peaks)), "all"]:
        first, *rest = (peak[name] for peak in peaks)
        cells = [size_text(first), *(size_text(size) + (f" ({size / first:.0%})" if first else "") for size in rest)]
        rows.append(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<div class="panels">{"".join(_figure(one, axis) for one in plotted)}</div>',
        "<h2>At the peak</h2>",
        f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>",
        "<h2>Largest holders at the peak</h2>",
        f'<div class="panels">{"".join(map(_holder_table, plotted))}</div>',
    ]
    page = _PAGE.replace("TITLE", html.escape(title)).replace("BODY", "\n".join(body))
    Path(path).write_text(page, encoding="utf-8")


def _figure(plotted: PlottedProfile, axis: ByteAxis) -> str:
    """Return the timeline of one profile, the table of what is alive under the pointer, and the data of its script."""
    xs = [round(_x(plotted, x), 2) for x in plotted.x]
    when = []  # the time of each event, with the step and the phase that it belongs to
    for event, x in zip(plotted.events, plotted.x, strict=True):
        time = f"event {event}" if plotted.profile.forecast else f"{x:.3f} ms"
        when.append(", ".join([time, *phases_at(plotted.profile.marks, event)]))
    data = {
        "x": xs,
        "when": when,
        "series": [plotted.series[category] for category in axis.categories],
        "peak": plotted.events.index(plotted.peak_at),
    }
    # Without `<`, nothing in it can end the script element.
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    rows = [
        f'<tr><th><i style="background:{COLOURS[category]}"></i>{category}</th><td></td></tr>'
        for category in reversed(axis.categories)
    ]
    return (
        f"<figure><figcaption>{html.escape(plotted.title)}</figcaption>{_svg(plotted, axis, xs)}"
        f'<table class="now"><caption></caption>{"".join(rows)}<tr><th>all</th><td></td></tr></table>'
        f'<script type="application/json">{script}</script></figure>'
    )


def _x(plotted: PlottedProfile, x: float) -> float:
    """Return where in the SVG a value of the x axis is."""
    return _LEFT + (x - plotted.x[0]) / ((plotted.x[-1] - plotted.x[0]) or 1) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: ByteAxis, size: float) -> float:
    """Return where in the SVG a number of bytes is."""
    return _HEIGHT - _BOTTOM - size / axis.top * (_HEIGHT - _TOP - _BOTTOM)


def _svg(plotted: PlottedProfile, axis: ByteAxis, xs: Sequence[float]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in _ticks(axis.top / axis.unit):
        y = _y(axis, value * axis.unit)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>')
    for value in _ticks(plotted.x[-1] - plotted.x[0]):
        x = _x(plotted, plotted.x[0] + value)
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 16}">{value:g}</text>')
    place = f"translate(16 {(_TOP + bottom) / 2}) rotate(-90)"
    parts.append(f'<text class="x" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}">{plotted.x_label}</text>')
    parts.append(f'<text class="x" transform="{place}">memory alive, {axis.unit_name}</text>')
    below = [0] * len(xs)
    for category in axis.categories:  # an area for each, stacked
        above = [low + value for low, value in zip(below, plotted.series[category], strict=True)]
        outline = _corners(axis, xs, above) + _corners(axis, xs, below)[::-1]
        points = " ".join(f"{x:g},{y:.1f}" for x, y in outline)
        parts.append(f'<polygon fill="{COLOURS[category]}" points="{points}"><title>{category}</title></polygon>')
        below = above
    for mark in plotted.marks:
        x, kind = _x(plotted, mark.x), "step" if mark.is_step else "phase"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        top = _TOP - (20 if mark.is_step else 5)  # steps in a row of labels above that of phases
        parts.append(f'<text class="{kind}" x="{x:.1f}" y="{top}">{html.escape(mark.label)}</text>')
    x, height = _x(plotted, plotted.peak_x), _y(axis, plotted.peak)
    label_left = x > _WIDTH / 2  # of the dot, where there is more room
    anchor = f'y="{height - 7:.1f}" text-anchor="{"end" if label_left else "start"}"'
    parts.append(f'<line class="phase" x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
    parts.append(f'<circle cx="{x:.1f}" cy="{height:.1f}" r="4"/>')
    text = f"peak {size_text(plotted.peak)}"
    parts.append(f'<text class="peak" x="{x + (-8 if label_left else 8):.1f}" {anchor}>{text}</text>')
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{bottom}"/>')
    label = f"{html.escape(plotted.title)}: bytes alive by category, peak {size_text(plotted.peak)}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _corners(axis: ByteAxis, xs: Sequence[float], sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return the corners of a line that stays at each size until the next event."""
    ys = [_y(axis, size) for size in sizes]
    corners = [(xs[0], ys[0])]
    for x, old, new in zip(xs[1:], ys[:-1], ys[1:], strict=True):
        corners += [(x, old), (x, new)] if old != new else []
    return [*corners, (xs[-1], ys[-1])]


def _ticks(end: float) -> list[float]:
    """Return four to eight round numbers from 0 up to `end`."""
    if end <= 0:
        return [0]
    power = 10.0 ** math.floor(math.log10(end / 4))
    distance = next(step * power for step in (1, 2, 5, 10) if end / (step * power) < 8)
    return [float(f"{i * distance:.12g}") for i in range(int(end / distance) + 1)]


def _holder_table(plotted: PlottedProfile) -> str:
    holders = plotted.profile.holders[:_HOLDERS]
    heads = "".join(f"<th>{head}</th>" for head in ("bytes", "category", "module", "shape, dtype", "line"))
    rows = []
    for holder in holders:
        shape = f"{tuple(holder.shape)} {holder.dtype}"
        texts = (holder.category, holder.module, shape, holder.line)
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        rows.append(f'<tr><td class="bytes">{size_text(holder.bytes)}</td>{cells}</tr>')
    hidden = len(plotted.profile.holders) - len(holders)
    more = f"<caption>{hidden} more are not listed</caption>" if hidden else ""
    caption = f"<figcaption>{html.escape(plotted.title)}</figcaption>"
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
