"""Draws measured figures: as bars, or as lines over the batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Figures, FiguresError, Result, Row, by_model, cases

_SWEEP = 3  # if a model has this many batch sizes or more, lines are drawn instead of bars


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
    columns = models if swept else [[result] for group in models for result in group]
    panels = _LINES if swept else _BARS
    panels = [panel for panel in panels if any(panel.has(result, row) for result, row in cases(figures.results))]
    variants = list({row.variant: row.label for _, row in cases(figures.results)}.items())
    size = (3.4 * len(columns) + 2.6, len(panels) * (3.2 if swept else 0.34 * len(variants) + 1.1) + 0.6)
    figure = figure_class(path)(figsize=size, dpi=130, layout="constrained")
    grid = figure.subplots(len(panels), len(columns), squeeze=False, sharey=False if swept else "row")
    for panel, row_of_axes in zip(panels, grid, strict=True):
        for axes, group in zip(row_of_axes, columns, strict=True):
            (_draw_lines if swept else _draw_bars)(axes, panel, group, variants)
    setting = figures.setting
    where = f"{setting['device']}, torch {setting['torch']}, {setting['date']}"
    figure.suptitle(("One training step,\n" if len(columns) == 1 else "One training step, ") + where, fontsize=11)
    handles, names = _legend_entries(grid)
    footnote = (
        "(*) the kernels alone: no clipping, no schedule, no input" if any("(*)" in v for _, v in variants) else None
    )
    if names or footnote:
        figure.legend(
            handles,
            names,
            title=footnote,
            title_fontsize=8,
            loc="outside lower center",
            ncols=max(1, min(len(names), 4)),
            fontsize=8,
        )
    figure.savefig(path)


@dataclass(frozen=True)
class _Panel:
    """One quantity to draw."""

    unit: str
    value: Callable[[Result, Row], float | None]
    linear: bool = False

    def has(self, result: Result, row: Row) -> bool:
        return self.value(result, row) is not None


_TIME = _Panel("ms per step", lambda _, row: row.ms)
_MEMORY = _Panel("peak device memory, MiB", lambda _, row: row.peak_mib)
_RATIO = _Panel("times faster than torch AMP, eager", lambda result, row: result.ratio(row), linear=True)
_BARS = [_TIME, _MEMORY]
_LINES = [_TIME, _RATIO, _MEMORY]


def _draw_bars(axes: Any, panel: _Panel, group: Sequence[Result], variants: Sequence[tuple[str, str]]) -> None:
    result = group[0]
    rows = {row.variant: row for row in result.rows}
    ends = [0.0]
    for i, (key, _) in enumerate(variants):
        row = rows.get(key)
        value = None if row is None else panel.value(result, row)
        if row is None or value is None:
            axes.text(0, i, " not measured" if row is None or not row.error else " failed", va="center", fontsize=8)
            continue
        ends.append(end := _draw_bar(axes, panel, i, row, value))
        ratio = result.ratio(row) if panel is _TIME else None
        number = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        axes.text(end, i, f" {number}" + (f", {ratio:.1f}x" if ratio else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(variants)), [label for _, label in variants], fontsize=8)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlim(0, 1.42 * max(ends) or 1.0)
    axes.set_xlabel(panel.unit, fontsize=9)
    axes.set_title(f"{result.model}, batch {result.batch}", fontsize=10)


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
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    if panel.linear:
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("batch size", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.set_title(group[0].model, fontsize=10)
    axes.grid(alpha=0.3)


def _legend_entries(grid: Any) -> tuple[list[Any], list[str]]:
    entries: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    return list(entries.values()), list(entries)
