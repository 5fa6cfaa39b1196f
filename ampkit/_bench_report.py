"""How measured figures are kept and shown: table, JSON file, plot."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ._errors import AmpkitError

BASE = "amp"  # the variant that ratios refer to
NULL_REGION = 1.05  # below this ratio a capture does not pay
_SCHEMA = 1  # of the JSON file; raised when a field changes its meaning


class FiguresError(AmpkitError, ValueError):
    """A file is not what `--json` writes, or files do not belong together."""


@dataclass
class Row:
    """One variant of one model and batch size. None, or "", is what was not measured.

    Attributes:
        variant: its name in `--variants`.
        label: its name in tables.
        ms: milliseconds per step, median of the repeats.
        fastest: milliseconds per step in the fastest repeat.
        slowest: likewise.
        busy_ms: time per step in which a kernel runs on the GPU.
        kernels: how many run per step.
        host_us: time until a call returns with nothing queued on the device.
        launch_us: how much of it the driver takes to launch a graph.
        setup_s: what the first steps take longer than as many steps later on, and what comes before them.
        peak_mib: device memory that steps need, pools of graphs as a whole.
        setup_peak_mib: the most that was allocated up to the first of the timed steps.
        loss: mean over the last pass over the batches in the checked steps.
        expected: the same of an eager run with torch AMP.
        difference: the largest of the losses of all passes from those expected, as a share of what these fall by.
        off: whether it is more than the tolerance.
        error: why there are no figures.
        report: what ampkit says it did.
    """

    variant: str
    label: str
    ms: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    busy_ms: float | None = None
    kernels: float | None = None
    host_us: float | None = None
    launch_us: float | None = None
    setup_s: float | None = None
    peak_mib: float | None = None
    setup_peak_mib: float | None = None
    loss: float | None = None
    expected: float | None = None
    difference: float | None = None
    off: bool = False
    error: str = ""
    report: dict[str, Any] | None = None

    @property
    def busy_share(self) -> float | None:
        """The share of a step in which the GPU is busy. Two measurements: it may exceed 1 by their error."""
        return self.busy_ms / self.ms if self.busy_ms is not None and self.ms else None


@dataclass
class Result:
    """What was measured of one model and batch size."""

    model: str
    batch: int
    rows: list[Row] = field(default_factory=list)

    def ratio(self, row: Row) -> float | None:
        """Return how many times faster than eager torch AMP a row is."""
        base = next((other.ms for other in self.rows if other.variant == BASE), None)
        return base / row.ms if base and row.ms else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and what follows from them, as a dict that `json` takes."""
        rows = [{**asdict(row), "ratio": self.ratio(row), "busy_share": row.busy_share} for row in self.rows]
        return {"model": self.model, "batch": self.batch, "rows": rows}


@dataclass
class Figures:
    """All that one run of the benchmark measured.

    Attributes:
        setting: device, versions, date, policy, command, tolerance, by name.
        notes: sentences about what was left out or is not what it seems.
        results: in the order of measurement.
    """

    setting: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def to_json(self) -> str:
        """Return it as text for a file."""
        results = [result.to_dict() for result in self.results]
        figures = {"schema": _SCHEMA, **self.setting, "notes": self.notes, "results": results}
        return json.dumps(_without_nan(figures), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Figures":
        """Return what `to_json` wrote.

        Raises:
            FiguresError: it did not write this.
        """
        try:
            figures = json.loads(text)
            if figures.pop("schema") != _SCHEMA:
                raise FiguresError("the file is of another version of ampkit.")
            notes, results = figures.pop("notes"), figures.pop("results")
            known = {f.name for f in fields(Row)}
            rows = [[Row(**{k: v for k, v in row.items() if k in known}) for row in r["rows"]] for r in results]
            parts = [Result(r["model"], r["batch"], part) for r, part in zip(results, rows, strict=True)]
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise FiguresError(f"not a file that `python -m ampkit bench --json` wrote ({error!r}).") from error
        return cls(figures, notes, parts)


def _without_nan(value: Any) -> Any:
    """Return the tree with None for numbers that JSON does not know: a loss may be nan."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Figures:
    """Return the figures in a file.

    Raises:
        OSError: there is no such file.
        FiguresError: `--json` did not write it.
    """
    try:
        return Figures.from_json(path.read_text())
    except FiguresError as error:
        raise FiguresError(f"{path}: {error}") from error


def joined(parts: Sequence[Figures]) -> Figures:
    """Return the figures of several runs as one.

    Raises:
        FiguresError: they were taken on different devices, versions of torch, or policies.
    """
    for key in ("device", "torch", "policy"):
        values = {str(part.setting.get(key)) for part in parts}
        if len(values) > 1:
            raise FiguresError(f"the files differ in {key}: {', '.join(sorted(values))}.")
    notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    return Figures(parts[0].setting, notes, [result for part in parts for result in part.results])


# ---------------------------------------------------------------------------------------------------------------- table

_Column = tuple[str, int, Callable[[Result, Row], str]]  # heading, width, and the text of a cell
_COLUMNS: list[_Column] = [
    ("ms/step", 9, lambda _, row: _number(row.ms, 3)),
    ("spread", 18, lambda _, row: "-" if row.ms is None else f"[{row.fastest:.3f}, {row.slowest:.3f}]"),
    ("vs AMP", 7, lambda result, row: _number(result.ratio(row), 2, "x")),
    ("GPU ms", 8, lambda _, row: _number(row.busy_ms, 3)),
    ("busy", 5, lambda _, row: "-" if row.busy_share is None else f"{row.busy_share:.0%}"),
    ("kernels", 7, lambda _, row: _number(row.kernels, 0)),
    ("host us", 8, lambda _, row: _number(row.host_us, 0)),
    ("launch", 7, lambda _, row: _number(row.launch_us, 0)),
    ("set-up s", 8, lambda _, row: _number(row.setup_s, 2)),
    ("peak MiB", 9, lambda _, row: _number(row.peak_mib, 0)),
    ("loss (expected)", 18, lambda _, row: _losses(row)),
]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _losses(row: Row) -> str:
    # nan is None in a file
    loss = "nan" if row.loss is None and row.off else _number(row.loss, 4)
    return loss + (f" ({row.expected:.4f})" if row.expected is not None else "") + (" !" if row.off else "")


def table(figures: Figures) -> str:
    """Return the figures as text: a table for every model and batch size, and what to know about them."""
    setting = figures.setting
    head = f"{setting['device']}, torch {setting['torch']}, {setting['policy']}, median of {setting['repeats']} repeats"
    columns = [column for column in _COLUMNS if any(column[2](*pair) != "-" for pair in _cases(figures.results))]
    parts = [head, *figures.notes, *(_table(result, columns) for result in figures.results)]
    if setting["cuda"]:  # else graphs are emulated
        parts += [line for _, group in _by_model(figures.results) for line in _null_region(group)]
    return "\n".join([*parts, "", *_legend(figures)])


def _table(result: Result, columns: Sequence[_Column]) -> str:
    labels = max(len(row.label) for row in result.rows) if result.rows else 0
    cells = " ".join(f"{heading:>{width}}" for heading, width, _ in columns)
    lines = [_line(result, row, labels, columns) for row in result.rows]
    return "\n".join([f"\n{result.model}, batch {result.batch}", f"{'variant':<{labels}}  {cells}", *lines])


def _line(result: Result, row: Row, labels: int, columns: Sequence[_Column]) -> str:
    cells = " ".join(f"{cell(result, row):>{width}}" for _, width, cell in columns)
    return f"{row.label:<{labels}}  {f'failed: {row.error}' if row.error else cells}"


def _legend(figures: Figures) -> list[str]:
    rows = [row for result in figures.results for row in result.rows]
    steps, tolerance = figures.setting["checked_steps"], figures.setting["tolerance"]
    lines = [
        f"loss: after {steps} steps from the same weights on the same batches; expected: of the same {steps} steps "
        "written with torch AMP, eager."
    ]
    if any("(*)" in row.label for row in rows):
        lines.append("(*) one batch that lies on the device, without clipping and schedule: the kernels alone.")
    if any(row.off for row in rows):
        lines.append(
            f"! off: on the way there it differs by more than {tolerance:.0%} of what the expected loss falls by."
        )
    return lines


def _by_model(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the results of each model in order of batch size, models in order of appearance."""
    models = dict.fromkeys(result.model for result in results)
    in_order = sorted(results, key=lambda result: result.batch)
    return [(model, [result for result in in_order if result.model == model]) for model in models]


def _null_region(group: Sequence[Result]) -> list[str]:
    """Return a line that says up to which batch size a capture pays, if there are several."""
    ratios = [
        (result.batch, ratio)
        for result in group
        for row in result.rows
        if row.variant == "graphed" and (ratio := result.ratio(row)) is not None
    ]
    if len(ratios) < 2:
        return []
    told = ", ".join(f"{ratio:.2f}x at {batch}" for batch, ratio in ratios)
    # from the largest batch down, as long as it does not pay
    null = [batch for i, (batch, _) in enumerate(ratios) if all(ratio < NULL_REGION for _, ratio in ratios[i:])]
    end = f"below {NULL_REGION}x from batch {null[0]} on" if null else f"{NULL_REGION}x or more up to the largest"
    return [f"\n{group[0].model}: graphed_step over torch AMP, eager: {told}; {end}."]


# ----------------------------------------------------------------------------------------------------------------- plot


def draw(figures: Figures, path: Path) -> None:
    """Draw time and memory per model: bars, or lines over the batch size where a model has several.

    Args:
        figures: what was measured.
        path: the image file.

    Raises:
        ImportError: matplotlib is not installed.
        FiguresError: nothing was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ampkit[plots]'") from error
    models = _by_model(figures.results)
    if not any(row.ms is not None for result in figures.results for row in result.rows):
        raise FiguresError("there is nothing to plot: no variant has a time.")
    swept = any(len(group) > 1 for _, group in models)
    panels = _LINES if swept else _BARS
    panels = [panel for panel in panels if any(panel.has(result, row) for result, row in _cases(figures.results))]
    variants = list({row.variant: row.label for _, row in _cases(figures.results)}.items())
    size = (3.4 * len(models) + 2.6, len(panels) * (3.2 if swept else 0.34 * len(variants) + 1.1) + 0.6)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    grid = figure.subplots(len(panels), len(models), squeeze=False, sharey=False if swept else "row")
    for panel, row_of_axes in zip(panels, grid, strict=True):
        for axes, (_, group) in zip(row_of_axes, models, strict=True):
            (_draw_lines if swept else _draw_bars)(axes, panel, group, variants)
    setting = figures.setting
    figure.suptitle(f"One training step, {setting['device']}, torch {setting['torch']}, {setting['date']}", fontsize=11)
    handles, names = _legend_entries(grid)
    bare = "(*) the kernels alone: no clipping, no schedule, no input" if any("(*)" in v for _, v in variants) else None
    if names or bare:
        figure.legend(
            handles,
            names,
            title=bare,
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


def _cases(results: Sequence[Result]) -> list[tuple[Result, Row]]:
    return [(result, row) for result in results for row in result.rows]


def _color(i: int) -> str:
    return f"C{i % 10}"


def _draw_bars(axes: Any, panel: _Panel, group: Sequence[Result], variants: Sequence[tuple[str, str]]) -> None:
    result = group[0]
    rows = {row.variant: row for row in result.rows}
    largest = max((panel.value(result, row) or 0.0 for row in result.rows), default=0.0) or 1.0
    for i, (key, _) in enumerate(variants):
        row = rows.get(key)
        value = None if row is None else panel.value(result, row)
        if row is None or value is None:
            axes.text(0, i, " not measured" if row is None or not row.error else " failed", va="center", fontsize=8)
            continue
        end = _draw_bar(axes, panel, i, row, value)
        ratio = result.ratio(row) if panel is _TIME else None
        told = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        axes.text(end, i, f" {told}" + (f", {ratio:.1f}x" if ratio else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(variants)), [label for _, label in variants], fontsize=8)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlim(0, 1.42 * largest)
    axes.set_xlabel(panel.unit, fontsize=9)
    axes.set_title(f"{result.model}, batch {result.batch}", fontsize=10)


def _draw_bar(axes: Any, panel: _Panel, i: int, row: Row, value: float) -> float:
    """Draw one bar; return where it ends. One of time shows its spread, and how much of it the GPU is busy."""
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
            for result, row in _cases(group)
            if row.variant == key and (value := panel.value(result, row)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=_color(i), label=label)
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
