"""The best step of ampkit and the best of torch.compile, of each model, in one line.

    python tests/benchmarks/beside_compile.py                      every model of `python -m ampkit bench`
    python tests/benchmarks/beside_compile.py --model resnet50 vit_b_16 -b 32 --repeats 5 --json figures.json
    python tests/benchmarks/beside_compile.py --read figures.json  the lines alone, of what was measured

It runs `python -m ampkit bench` for each model with the variants that are to be compared, and `beside_jax.py` for the
MLPs that people train in JAX. It passes all other options on; `--compiled-code FOLDER` and `--time-limit S`, which
counts for each model alone, keep such a run short.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import beside_jax

from ampkit.__main__ import main as command_line
from ampkit._commands.bench.cases import CASES
from ampkit._commands.bench.report import BASE, Figures, Result, Row, joined, read, table
from ampkit._commands.output import FOUND

OURS = ("graphed", "graphed-compile", "graphed-default", "graphed-max")
OURS_TOGETHER = ("scan", "scan-default", "scan-max")  # many steps per call
THEIRS = ("compile", "reduce-overhead", "max-autotune")

_EACH = (BASE, "reduce-overhead", "max-autotune", "graphed", "graphed-default", "graphed-max")
_IN_SECONDS = (*_EACH, "compile")  # they compile in seconds
_BESIDE_JAX = (*_IN_SECONDS, "scan", "scan-max")
_COMPARED = {
    "mlp": _IN_SECONDS,
    "mlp-tiny": _BESIDE_JAX,
    "mlp-small": _BESIDE_JAX,
    "mlp-deep": _BESIDE_JAX,
    "resnet18-cifar": _IN_SECONDS,
}


def compared(model: str) -> tuple[str, ...]:
    """Return the variants that are measured of a model: few where a compilation takes a minute."""
    return _COMPARED.get(model, _EACH)


def best(result: Result, variants: Sequence[str]) -> Row | None:
    """Return the fastest of these variants, None if none of them has a time. A row whose loss is off counts as none."""
    rows = [row for row in result.rows if row.variant in variants and row.ms is not None and not row.off]
    return min(rows, key=lambda row: row.ms or 0.0, default=None)


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


def measured(models: Sequence[str], options: Sequence[str]) -> Iterator[Figures]:
    """Measure one model after another, and yield its figures. Ends the process if a command could not do its work."""
    with tempfile.TemporaryDirectory(prefix="ampkit-beside-") as folder:
        file = Path(folder, "figures.json")
        for model in models:
            argv = ["bench", "--model", model, "--variants", *compared(model), "--json", str(file), *options]
            if (code := command_line(argv)) > FOUND:
                sys.exit(code)
            figures = read(file)
            if _COMPARED.get(model) is _BESIDE_JAX and beside_jax.has_jax():
                beside_jax.add(figures)
                print(table(figures))
            yield figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", nargs="+", default=list(CASES), help="as `python -m ampkit bench` takes them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all models to this file")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="measure nothing; what --json wrote")
    args, options = parser.parse_known_args(argv)
    parts: list[Figures] = []
    for figures in map(read, args.read) if args.read else measured(args.model, options):
        parts.append(figures)
        if args.json is not None:  # what was measured is kept if a later model fails
            args.json.write_text(joined(parts).to_json())
    print("\n".join(lines(joined(parts))))


if __name__ == "__main__":
    main()
