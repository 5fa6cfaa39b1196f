"""The figures of a benchmark, their JSON file, and the tables that show them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..._errors import UsageError
from ..._text import error_line, grid
from ..._user_line import user_line

BASE = "amp"  # ratios are relative to this variant
SWEPT = ("amp-fused", "amp")  # a sweep compares the captured step with the first of these that was measured
NULL_REGION = 0.05  # of a step: the null region is the batch sizes at which a capture saves less
OUT_OF_MEMORY = "out of memory"  # the error of a row begins with this if memory was too small
_NEEDED = {"device", "torch", "cuda", "date", "policy", "repeats", "checked_steps", "tolerance"}  # keys of a setting
_SCHEMA = 1  # version of the JSON file; it rises when a field changes its meaning


class FiguresError(UsageError):
    """A file was not written by `--json`, or files cannot be shown together, or figures cannot be drawn."""


@dataclass
class Row:
    """One variant of one model and batch size. A value that was not measured is None or ""."""

    variant: str  # its name in `--variants`
    label: str  # its name in tables
    ms: float | None = None  # milliseconds per step, median of the repeats
    fastest: float | None = None  # the same in the fastest repeat
    slowest: float | None = None  # and in the slowest one
    busy_ms: float | None = None  # time per step in which a kernel runs on the GPU
    kernels: float | None = None  # number of kernels per step
    idle_share: float | None = None  # of the profiled time: neither a kernel nor a copy runs
    between_share: float | None = None  # the part of it between launches by the host, not between kernels of one graph
    copy_share: float | None = None  # of the profiled time: only copies from or to the host run, on the copy engines
    host_us: float | None = None  # microseconds until a call returns; see `host_time`
    launch_us: float | None = None  # how many of them the driver takes to launch a graph
    setup_s: float | None = None  # to build the variant, and the time by which its first steps exceed later ones
    peak_mib: float | None = None  # device memory that steps need, with the whole pools of graphs
    setup_peak_mib: float | None = None  # the most memory that was allocated before the first timed step
    loss: float | None = None  # mean loss of the last checked pass over the batches
    expected: float | None = None  # the same loss of an eager run with torch AMP
    # The difference of a pass from its expected loss, as a share of the fall of the expected losses: of the pass in
    # which it comes closest to its tolerance, or exceeds it most. Then the tolerance and what rounding alone makes.
    difference: float | None = None
    tolerance: float | None = None
    noise: float | None = None
    compared: int | None = None  # the last step whose tolerance is so small that the comparison proves something
    off: bool = False  # whether the difference is larger than the tolerance, or a loss is nan
    error: str = ""  # why there are no figures
    report: dict[str, Any] | None = None  # of ampkit

    @property
    def busy_share(self) -> float | None:
        """The share of a step in which the GPU is busy. Both times are measured, so it may be slightly above 1."""
        return self.busy_ms / self.ms if self.busy_ms is not None and self.ms else None


@dataclass
class Result:
    """The rows of one model and batch size."""

    model: str
    batch: int
    rows: list[Row] = field(default_factory=list)

    def ratio(self, row: Row) -> float | None:
        """Return how many times as fast as eager torch AMP a row is."""
        base = next((other.ms for other in self.rows if other.variant == BASE), None)
        return base / row.ms if base and row.ms else None


@dataclass
class Figures:
    """Everything that one run of the benchmark measured."""

    setting: dict[str, Any]  # device, versions, date, policy, command, tolerance, by name
    notes: list[str] = field(default_factory=list)  # sentences for the reader, as about variants that were left out
    results: list[Result] = field(default_factory=list)  # in the order of measurement

    def to_json(self) -> str:
        """Return everything as JSON."""
        results = []
        for found in self.results:
            rows = [{**asdict(row), "ratio": found.ratio(row), "busy_share": row.busy_share} for row in found.rows]
            results.append({"model": found.model, "batch": found.batch, "rows": rows})
        null_regions = {sweep.model: sweep.null_region for sweep in sweeps(self) if sweep.has_shares}
        parts = {"notes": self.notes, "null_regions": null_regions, "results": results}
        figures = {"schema": _SCHEMA, **self.setting, **parts}
        return json.dumps(without_nan(figures), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Figures":
        """Return the figures that `to_json` wrote. Raises FiguresError if the text is something else."""
        try:
            figures = json.loads(text)
            if figures.pop("schema") != _SCHEMA:
                raise FiguresError("the file is of another version of ampkit. Measure again, with --json FILE.")
            notes, results = figures.pop("notes"), figures.pop("results")
            figures.pop("null_regions", None)  # computed from the results
            figures.setdefault("input", "prefetch")  # files of November 2026 lack it
            if missing := _NEEDED - figures.keys():
                raise FiguresError(f"the file does not say the {min(missing)} of the run.")
            known = {f.name for f in fields(Row)}
            rows = [[Row(**{k: v for k, v in row.items() if k in known}) for row in r["rows"]] for r in results]
            parts = [Result(r["model"], r["batch"], part) for r, part in zip(results, rows, strict=True)]
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise FiguresError(f"not a file that `python -m ampkit bench --json` wrote ({error!r}).") from error
        return cls(figures, notes, parts)


def without_nan(value: Any) -> Any:
    """Return the value with None in place of nan and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Figures:
    """Return the figures in a file. Raises FiguresError if `--json` did not write it."""
    try:
        return Figures.from_json(path.read_text())
    except (FiguresError, UnicodeDecodeError) as error:
        raise FiguresError(f"{path}: {error}") from error


def joined(parts: Sequence[Figures]) -> Figures:
    """Return the figures of several runs as one. Raises FiguresError if the runs cannot be compared."""
    for key in ("device", "torch", "policy", "input", "checked_steps"):
        values = {str(part.setting.get(key)) for part in parts}
        if len(values) > 1:
            raise FiguresError(f"the files differ in {key}: {', '.join(sorted(values))}.")
    notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    setting = {**parts[0].setting}
    for key in ("repeats", "seconds_per_repeat"):  # in these they may differ: the smallest and the largest value
        given = [part.setting[key] for part in parts if key in part.setting]
        # A file that was written with both --json and --read contains ranges already.
        found = [value for each in given for value in (each if isinstance(each, list) else [each])]
        if len(set(found)) > 1:
            setting[key] = [min(found), max(found)]
    return Figures(setting, notes, [result for part in parts for result in part.results])


def chosen(
    figures: Figures,
    models: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
) -> Figures:
    """Return the figures with only these models, batch sizes and variants: all if None, a FiguresError if none."""
    found = [
        Result(result.model, result.batch, [row for row in result.rows if variants is None or row.variant in variants])
        for result in figures.results
        if (models is None or result.model in models) and (batches is None or result.batch in batches)
    ]
    found = [result for result in found if result.rows]
    if not found:
        there = dict.fromkeys(f"{result.model} with batch {result.batch}" for result in figures.results)
        raise FiguresError(f"the files have no such model, batch size or variant. They have {', '.join(there)}.")
    return Figures(figures.setting, figures.notes, found)


# ---------------------------------------------------------------------------------------------------------------- table

_Column = tuple[str, int, Callable[[Result, Row], str]]  # heading, width, and the text of a cell
_COLUMNS: tuple[_Column, ...] = (
    ("ms/step", 9, lambda _, row: _number(row.ms, 3)),
    ("spread", 18, lambda _, row: "-" if row.ms is None else f"[{row.fastest:.3f}, {row.slowest:.3f}]"),
    ("vs AMP", 7, lambda result, row: _number(result.ratio(row), 2, "x")),
    ("GPU ms", 8, lambda _, row: _number(row.busy_ms, 3)),
    ("busy", 5, lambda _, row: "-" if row.busy_share is None else f"{row.busy_share:.0%}"),
    ("kernels", 7, lambda _, row: _number(row.kernels, 0)),
    ("idle", 6, lambda _, row: _percent(row.idle_share)),
    ("between", 7, lambda _, row: _percent(row.between_share)),
    ("copying", 7, lambda _, row: _percent(row.copy_share)),
    ("host us", 8, lambda _, row: _number(row.host_us, 0)),
    ("launch", 7, lambda _, row: _number(row.launch_us, 0)),
    ("set-up s", 8, lambda _, row: _number(row.setup_s, 2)),
    ("peak MiB", 9, lambda _, row: _number(row.peak_mib, 0)),
)


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _losses(row: Row, checked: int) -> str:
    """Return the cell with loss, expected loss, and a mark that the legend explains."""
    # A JSON file has None for nan.
    loss = "nan" if row.loss is None and row.off else _number(row.loss, 4)
    in_part = row.compared is not None and row.compared < checked
    mark = " !" if row.off else " ?" if in_part else ""
    return loss + (f" ({row.expected:.4f})" if row.expected is not None else "") + mark


def table(figures: Figures) -> str:
    """Return the figures as text: a table for every model and batch size, and a legend."""
    setting = figures.setting
    repeats = setting["repeats"]
    repeats = " to ".join(map(str, repeats)) if isinstance(repeats, list) else repeats
    head = f"{setting['device']}, torch {setting['torch']}, {setting['policy']}, median of {repeats} repeats"
    loss: _Column = ("loss (expected)", 18, lambda _, row: _losses(row, setting["checked_steps"]))
    columns = [part for part in (*_COLUMNS, loss) if any(part[2](*pair) != "-" for pair in cases(figures.results))]
    parts = [f"{head}, input: {setting['input']}", *figures.notes]
    for result in figures.results:
        labels = max((len(row.label) for row in result.rows), default=0)
        cells = " ".join(f"{heading:>{width}}" for heading, width, _ in columns)
        parts += [f"\n{result.model}, batch {result.batch}", f"{'variant':<{labels}}  {cells}"]
        for row in result.rows:
            cells = " ".join(f"{cell(result, row):>{width}}" for _, width, cell in columns)
            parts.append(f"{row.label:<{labels}}  {f'failed: {row.error}' if row.error else cells}")
    parts += [_sweep_table(sweep) for sweep in sweeps(figures)]
    return "\n".join([*parts, "", *_legend(figures)])


def _legend(figures: Figures) -> list[str]:
    rows = [row for result in figures.results for row in result.rows]
    steps, tolerance = figures.setting["checked_steps"], figures.setting["tolerance"]
    lines = [
        f"loss: after {steps} steps from the same weights on the same batches; expected: the loss of the same steps "
        "written with torch AMP, eager."
    ]
    if any("(*)" in row.label for row in rows):
        lines.append("(*) only the kernels: one batch that is on the device already, no clipping, no schedule.")
    if off := [row for row in rows if row.off]:
        also = "" if any(row.noise is None for row in off) else ", and by more than rounding explains"
        lines.append(
            "! off: in one of the passes over the batches the loss differs from the expected one by more than "
            f"{tolerance:.0%} of the expected fall{also}."
        )
    for result in figures.results:  # where rounding requires a larger tolerance, or makes the comparison meaningless
        where = f"{result.model}, batch {result.batch}"
        noisy = [
            (row.tolerance, row.noise) for row in result.rows if row.tolerance is not None and row.noise is not None
        ]
        most, noise = max(noisy, default=(0.0, 0.0))
        if most > tolerance:
            lines.append(
                f"{where}: rounding alone changes losses by {noise:.1%} of their fall, so {most:.0%} is tolerated."
            )
        compared = min((row.compared for row in result.rows if row.compared is not None), default=steps)
        if compared < steps:
            lines.append(
                f"? {where}: after step {compared} of {steps}, rounding alone changes losses so much that comparing "
                "them proves little."
            )
    return lines


def by_model(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the results of each model in order of batch size, models in order of appearance."""
    models = dict.fromkeys(result.model for result in results)
    in_order = sorted(results, key=lambda result: result.batch)
    return [(model, [result for result in in_order if result.model == model]) for model in models]


def cases(results: Sequence[Result]) -> list[tuple[Result, Row]]:
    """Return every row with its result."""
    return [(result, row) for result in results for row in result.rows]


# ---------------------------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True)
class Sweep:
    """The captured and the eager step of one model at several batch sizes."""

    model: str
    points: list[tuple[int, Row, Row]]  # batch size, eager and captured step, in order of batch size
    emulated: bool = False  # whether the graph is, so that the times say nothing about a capture

    @property
    def shares(self) -> list[float | None]:
        """The share of the eager step's time that the capture saves at each point; None if one has no time."""
        times = [(None, None) if self.emulated else (eager.ms, captured.ms) for _, eager, captured in self.points]
        return [1 - captured / eager if captured is not None and eager else None for eager, captured in times]

    @property
    def has_shares(self) -> bool:
        """Whether both steps have a time at any batch size."""
        return any(share is not None for share in self.shares)

    @property
    def null_region(self) -> list[int]:
        """The batch sizes at which the capture saves less than `NULL_REGION` of a step."""
        saved = zip(self.points, self.shares, strict=True)
        return [batch for (batch, _, _), share in saved if share is not None and share < NULL_REGION]


def sweeps(figures: Figures) -> list[Sweep]:
    """Return a sweep for each model that was measured at several batch sizes, both captured and eagerly."""
    found = []
    for model, group in by_model(figures.results):
        rows = [(result.batch, {row.variant: row for row in result.rows}) for result in group]
        base = next((key for key in SWEPT if any(key in at for _, at in rows)), "")
        points = [(batch, at[base], at["graphed"]) for batch, at in rows if base in at and "graphed" in at]
        if len(points) > 1:
            found.append(Sweep(model, points, emulated=not figures.setting["cuda"]))
    return found


def _sweep_table(sweep: Sweep) -> str:
    """Return a table of both steps at each batch size, and sentences about the null region and memory."""
    rows = [["batch", "eager ms", "graphed ms", "saves", "eager MiB", "graphed MiB", ""]]
    for (batch, eager, graphed), share in zip(sweep.points, sweep.shares, strict=True):
        mark = "~" if batch in sweep.null_region else ""
        memory = [_number(row.peak_mib, 0) for row in (eager, graphed)]
        rows.append([str(batch), _time(eager), _time(graphed), "-" if share is None else f"{share:.0%}", *memory, mark])
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    lines = grid([*zip(*columns, strict=True)], texts=0)
    _, eager, graphed = sweep.points[0]
    lines.insert(0, f"\n{sweep.model}: {graphed.label} compared with {eager.label}")
    least = f"{NULL_REGION:.0%}"
    if sweep.emulated:
        lines.append("Graphs are emulated here: no null region.")
    elif sizes := ", ".join(map(str, sweep.null_region)):
        lines.append(f"~ null region: at batch {sizes} the capture saves less than {least} of a step.")
    elif sweep.has_shares:
        lines.append(
            f"No null region: the capture saves {least} of a step or more at each batch size where both have a time."
        )
    fits = [(batch, captured) for batch, eager, captured in sweep.points if eager.ms is not None]
    full = [str(batch) for batch, captured in fits if captured.error.startswith(OUT_OF_MEMORY)]
    if not sweep.emulated and (sizes := ", ".join(full)):
        lines.append(f"Memory: at batch {sizes} the eager step fits and the captured one does not.")
    return "\n".join(lines)


def _time(row: Row) -> str:
    return _number(row.ms, 3) if not row.error else OUT_OF_MEMORY if row.error.startswith(OUT_OF_MEMORY) else "failed"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host had too little memory."""
    messages = ("out of memory", "can't allocate memory")  # the second one comes from the host's allocator
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in messages)


def error_text(error: Exception) -> str:
    """Return the error of a row: type, first line of the message, and the user's line if there is one."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    where = user_line(error)
    return error_line(error) + (f" ({where})" if where else "")
