"""Draws measured figures: as bars, or as lines over the batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Figures, FiguresError, Result, Row, by_model, cases

_SWEEP = 3  # if a model has this many batch sizes or more, lines are drawn instead of bars

# In a text column of 740 pixels, that of the documentation, this font is 12 pixels high.
_WIDTH = 9.0  # inches
_DPI = 160
_FONT = 11


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
    swept = any(len(group) >= _SWEEP for group in models)
    panels = [
        panel
        for panel in (_LINES if swept else _BARS)
        if any(panel.has(result, row) for result, row in cases(figures.results))
    ]
    variants = list({row.variant: row.label for _, row in cases(figures.results)}.items())
    make_figure = figure_class(path)
    if swept:
        figure = make_figure(figsize=(_WIDTH, 2.7 * len(panels) + 1), dpi=_DPI, layout="constrained")
        grid = figure.subplots(len(panels), len(models), squeeze=False, sharey="row")
        for panel, axes_of_panel in zip(panels, grid, strict=True):
            for axes, group in zip(axes_of_panel, models, strict=True):
                _draw_lines(axes, panel, group, variants)
    else:
        results = [result for group in models for result in group]
        height = len(results) * (0.32 * len(variants) + 0.95) + 1
        figure = make_figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
        widths = [panel.width for panel in panels]
        grid = figure.subplots(len(results), len(panels), squeeze=False, sharey=True, width_ratios=widths)
        for result, axes_of_result in zip(results, grid, strict=True):
            for axes, panel in zip(axes_of_result, panels, strict=True):
                _draw_bars(axes, panel, result, variants)
    setting = figures.setting
    where = f"{setting['device']}, torch {setting['torch']}, {setting['date']}"
    figure.suptitle(f"One training step, {where}", fontsize=_FONT)
    handles, names = _legend_entries(grid)
    bare = any("(*)" in label for _, label in variants)
    footnote = "(*) the kernels alone: no clipping, no schedule, no input" if bare else None
    if names or footnote:
        columns = max(1, min(len(names), 2))
        place = {"loc": "outside lower center", "ncols": columns}
        figure.legend(handles, names, title=footnote, title_fontsize=_FONT, fontsize=_FONT, **place)
    figure.savefig(path)


@dataclass(frozen=True)
class _Panel:
    """One quantity to draw."""

    unit: str
    value: Callable[[Result, Row], float | None]
    linear: bool = False
    width: float = 1.0  # of bars, beside the other quantities

    def has(self, result: Result, row: Row) -> bool:
        return self.value(result, row) is not None


_TIME = _Panel("ms per step", lambda _, row: row.ms, width=1.6)
_MEMORY = _Panel("peak device memory, MiB", lambda _, row: row.peak_mib)
_RATIO = _Panel("times faster than torch AMP, eager", lambda result, row: result.ratio(row), linear=True)
_BARS = [_TIME, _MEMORY]
_LINES = [_TIME, _RATIO, _MEMORY]


def _draw_bars(axes: Any, panel: _Panel, result: Result, variants: Sequence[tuple[str, str]]) -> None:
    rows = {row.variant: row for row in result.rows}
    ends = [0.0]
    for i, (key, _) in enumerate(variants):
        row = rows.get(key)
        value = None if row is None else panel.value(result, row)
        if row is None or value is None:
            axes.text(0, i, " not measured" if row is None or not row.error else " failed", va="center", fontsize=_FONT)
            continue
        ends.append(end := _draw_bar(axes, panel, i, row, value))
        ratio = result.ratio(row) if panel is _TIME else None
        number = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        axes.text(end, i, f" {number}" + (f", {ratio:.1f}x" if ratio else ""), va="center", fontsize=_FONT)
    axes.set_yticks(range(len(variants)), [label for _, label in variants], fontsize=_FONT)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlim(0, 1.42 * max(ends) or 1.0)
    axes.set_xlabel(panel.unit, fontsize=_FONT)
    axes.set_title(f"{result.model}, batch {result.batch}", fontsize=_FONT)


def _draw_bar(axes: Any, panel: _Panel, i: int, row: Row, value: float) -> float:
    """Draw one bar and return where it ends. A bar of time also shows the spread, and how long the GPU is busy."""
    if panel is not _TIME or row.fastest is None or row.slowest is None:
        axes.barh(i, value, color="tab:green", alpha=0.6)
        return value
    spread = [[value - row.fastest], [row.slowest - value]]
    axes.barh(i, value, xerr=spread, capsize=3, color="tab:blue", alpha=0.35, label="step, fastest to slowest repeat")
    if row.busy_ms is not None:
        axes.barh(i, min(row.busy_ms, value), height=0.4, color="tab:blue", label="GPU busy")
    return row.slowest


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
