"""`bench --beside-compile`: the best step of ampkit and the best of torch.compile, of each model, in one line."""

from collections.abc import Sequence

from .report import BASE, Figures, Result, Row

OURS = ("graphed", "graphed-compile", "graphed-default", "graphed-max")
OURS_TOGETHER = ("scan", "scan-default", "scan-max")  # many steps per call
THEIRS = ("compile", "reduce-overhead", "max-autotune")

_EACH = (BASE, "reduce-overhead", "max-autotune", "graphed", "graphed-default", "graphed-max")
_IN_SECONDS = (*_EACH, "compile")  # they compile in seconds
_BESIDE_JAX = (*_IN_SECONDS, "scan", "scan-max", "jax-jit", "jax-scan")
_COMPARED = {
    "mlp": _IN_SECONDS,
    "mlp-tiny": _BESIDE_JAX,
    "mlp-small": _BESIDE_JAX,
    "mlp-deep": _BESIDE_JAX,
    "resnet18-cifar": _IN_SECONDS,
}


def compared(model: str) -> tuple[str, ...]:
    """Return the variants that `--beside-compile` measures of a model: few where a compilation takes a minute."""
    return _COMPARED.get(model, _EACH)


def best(result: Result, variants: Sequence[str]) -> Row | None:
    """Return the fastest of these variants, None if none of them has a time. A row whose loss is off counts as none."""
    rows = [row for row in result.rows if row.variant in variants and row.ms is not None and not row.off]
    return min(rows, key=lambda row: row.ms or 0.0, default=None)


def worth_profiling(result: Result) -> list[Row]:
    """Return the rows whose kernels the lines below tell of."""
    found = [best(result, variants) for variants in ((BASE,), THEIRS, OURS, OURS_TOGETHER)]
    return [row for row in found if row is not None]


def lines(figures: Figures) -> list[str]:
    """Return a line per model and way to call ampkit where both sides were measured, [] without a GPU.

    Graphs are emulated without a GPU, so that nothing is to be compared there.
    """
    if not figures.setting["cuda"]:
        return []
    found = [
        _line(result, ours, theirs)
        for result in figures.results
        for variants in (OURS, OURS_TOGETHER)
        if (ours := best(result, variants)) and (theirs := best(result, THEIRS))
    ]
    return ["", "best of ampkit / best of torch.compile, in time per step:", *found] if found else []


def _line(result: Result, ours: Row, theirs: Row) -> str:
    assert ours.ms is not None  # `best` returns no other rows
    assert theirs.ms is not None
    base = best(result, (BASE,))
    more = [f"{ours.ms:.3f} / {theirs.ms:.3f} ms"]
    if ours.kernels is not None:
        others = [f"{row.kernels:.0f} in {row.label}" for row in (theirs, base) if row is not None and row.kernels]
        more.append(", ".join([f"{ours.kernels:.0f} kernels", *others]))
    if base is not None and ours.peak_mib and base.peak_mib:
        more.append(f"peak {ours.peak_mib / base.peak_mib:.2f}x that of {base.label}")
    if ours.host_us is not None:
        more.append(f"host {ours.host_us:.0f} us")
    where = f"{result.model}, batch {result.batch}"
    return f"{where}: {ours.label} / {theirs.label} = {ours.ms / theirs.ms:.2f}x ({'; '.join(more)})"
