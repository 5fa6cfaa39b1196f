"""Draws the figures of `python -m ampkit bench --json`: as bars, or as lines over the batch size.

    python tests/benchmarks/draw_bench.py figures.json more.json --plot figures.png
    python tests/benchmarks/draw_bench.py figures.json --plot speed.png --model resnet50 --variants amp graphed

`loss_curves.py` takes `figure_class` from here.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampkit._commands.bench.report import Figures, FiguresError, Result, Row, by_model, cases, chosen, joined, read

_SWEEP = 3  # if a model has this many batch sizes or more, lines are drawn instead of bars

# In a text column of 740 pixels, that of the documentation, the letters of lines are 12 pixels high. Bars are narrower,
# so that their letters are as high on a phone.
_WIDTH, _WIDTH_OF_BARS = 9.0, 5.2  # inches
_DPI = 160
_FONT, _FONT_OF_BARS = 11, 9


def figure_class(path: Path) -> Any:
    """Return matplotlib's `Figure` class, after checking that it can write a file of this name.

    Raises:
        FiguresError: if matplotlib is not installed, or cannot write this kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FiguresError(f"--plot needs matplotlib: pip install 'ampkit[plots]' ({error})") from None
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise FiguresError(f"--plot {path}: the name must end in one of .{', .'.join(formats)}")
    return Figure


def draw(figures: Figures, path: Path) -> None:
    """Draw time and memory: as bars, or as lines over the batch size if a model has three sizes or more.

    Args:
        figures: what was measured.
        path: the image file.

    Raises:
        FiguresError: if nothing was measured, matplotlib is not installed, or it cannot write this kind of file.
    """
    models = [group for _, group in by_model(figures.results)]
    if not any(row.ms is not None for result in figures.results for row in result.rows):
        raise FiguresError("there is nothing to plot: no variant has a time.")
    variants = list({row.variant: row.label for _, row in cases(figures.results)}.items())
    swept = any(len(group) >= _SWEEP for group in models)
    figure, grid = (_lines if swept else _bars)(figure_class(path), models, variants)
    font = _FONT if swept else _FONT_OF_BARS
    setting = figures.setting
    where = f"{setting['device']}, torch {setting['torch']}, {setting['date']}"
    what = "" if swept else "\nmilliseconds, times as fast as torch AMP, peak device memory"
    figure.suptitle(f"One training step, {where}{what}", fontsize=font)
    handles, names = _legend_entries(grid)
    bare = any("(*)" in label for _, label in variants)
    footnote = "(*) the kernels alone: no clipping, no schedule, no input" if bare else None
    if names or footnote:
        columns = max(1, min(len(names), 2))
        place = {"loc": "outside lower center", "ncols": columns}
        figure.legend(handles, names, title=footnote, title_fontsize=font, fontsize=font, **place)
    figure.savefig(path)


def _lines(make_figure: Any, models: Sequence[Sequence[Result]], variants: Sequence[tuple[str, str]]) -> Any:
    """Return a figure with a column of lines for each model, and its axes."""
    measured = [case for group in models for case in cases(group)]
    panels = [panel for panel in _PANELS if any(panel.value(*case) is not None for case in measured)]
    figure = make_figure(figsize=(_WIDTH, 2.7 * len(panels) + 1), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(panels), len(models), squeeze=False, sharey="row")
    for panel, axes_of_panel in zip(panels, grid, strict=True):
        for axes, group in zip(axes_of_panel, models, strict=True):
            _draw_lines(axes, panel, group, variants)
    return figure, grid


def _bars(make_figure: Any, models: Sequence[Sequence[Result]], variants: Sequence[tuple[str, str]]) -> Any:
    """Return a figure with bars for each result, one below the other, and its axes."""
    results = [result for group in models for result in group]
    height = len(results) * (0.36 * len(variants) + 0.75) + 0.8
    figure = make_figure(figsize=(_WIDTH_OF_BARS, height), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(results), 1, squeeze=False)
    for result, axes in zip(results, grid[:, 0], strict=True):
        _draw_bars(axes, result, variants)
    return figure, grid


@dataclass(frozen=True)
class _Panel:
    """One quantity to draw as lines."""

    unit: str
    value: Callable[[Result, Row], float | None]
    linear: bool = False


_PANELS = [
    _Panel("ms per step", lambda _, row: row.ms),
    _Panel("times faster than torch AMP, eager", lambda result, row: result.ratio(row), linear=True),
    _Panel("peak device memory, MiB", lambda _, row: row.peak_mib),
]


def _draw_bars(axes: Any, result: Result, variants: Sequence[tuple[str, str]]) -> None:
    """Draw a bar of time for each variant. Above it stand its name, and in numbers what was measured."""
    rows = {row.variant: row for row in result.rows}
    right = axes.get_yaxis_transform()  # from 0 to 1 to the right, in rows downwards
    for i, (key, label) in enumerate(variants):
        row = rows.get(key)
        axes.text(0, i - 0.28, label, va="bottom", fontsize=_FONT_OF_BARS)
        numbers = _numbers(result, row)
        axes.text(1, i - 0.28, numbers, va="bottom", ha="right", transform=right, fontsize=_FONT_OF_BARS)
        if row is not None and row.ms is not None:
            _draw_bar(axes, i, row, row.ms)
    axes.set_yticks([])
    axes.set_ylim(len(variants) - 0.6, -0.85)
    axes.set_xlim(left=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_FONT_OF_BARS)
    axes.set_xlabel("ms per step", fontsize=_FONT_OF_BARS)
    axes.set_title(f"{result.model}, batch {result.batch}", loc="left", weight="bold", fontsize=_FONT_OF_BARS)


def _numbers(result: Result, row: Row | None) -> str:
    if row is None or row.ms is None:
        return "not measured" if row is None or not row.error else "failed"
    ratio = result.ratio(row)
    parts = [
        f"{row.ms:.3g} ms" if row.ms < 100 else f"{row.ms:.0f} ms",
        f"{ratio:.1f}x" if ratio else "",
        f"{row.peak_mib:.0f} MiB" if row.peak_mib is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _draw_bar(axes: Any, i: int, row: Row, ms: float) -> None:
    """Draw a bar of time, with the spread over the repeats, and how long the GPU is busy."""
    place = {"y": i, "height": 0.4, "color": "tab:blue"}
    if row.fastest is None or row.slowest is None:
        axes.barh(width=ms, alpha=0.35, label="step", **place)
    else:
        spread = [[ms - row.fastest], [row.slowest - ms]]
        axes.barh(width=ms, xerr=spread, capsize=2, alpha=0.35, label="step, fastest to slowest repeat", **place)
    if row.busy_ms is not None:
        axes.barh(width=min(row.busy_ms, ms), label="GPU busy", **{**place, "height": 0.22})


def _draw_lines(axes: Any, panel: _Panel, group: Sequence[Result], variants: Sequence[tuple[str, str]]) -> None:
    from matplotlib.ticker import LogLocator

    for i, (key, label) in enumerate(variants):
        points = [
            (result.batch, value)
            for result, row in cases(group)
            if row.variant == key and (value := panel.value(result, row)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{i % 10}", label=label)
    sizes = [result.batch for result in group]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=_FONT)
    if panel.linear:
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("batch size", fontsize=_FONT)
    axes.set_ylabel(panel.unit, fontsize=_FONT)
    axes.set_title(group[0].model, fontsize=_FONT)
    axes.grid(alpha=0.3)


def _legend_entries(grid: Any) -> tuple[list[Any], list[str]]:
    entries: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    return list(entries.values()), list(entries)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what --json wrote")
    parser.add_argument("--plot", required=True, type=Path, metavar="FILE", help="the image")
    parser.add_argument("--model", nargs="+", help="only these")
    parser.add_argument("--batch", nargs="+", type=int, help="only these")
    parser.add_argument("--variants", nargs="+", help="only these")
    args = parser.parse_args(argv)
    try:
        draw(chosen(joined([read(path) for path in args.files]), args.model, args.batch, args.variants), args.plot)
    except (FiguresError, OSError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    main()
