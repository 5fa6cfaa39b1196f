"""The command `bench`: its arguments, what they make it measure, and what is kept of a run that ends early."""

import argparse
import math
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..._errors import UsageError
from ..._precision.policy import Policy
from ..bench import curves as _bench_curves
from ..bench import measure as _bench
from ..bench import plot as _bench_plot
from ..bench import report as _bench_report
from ..output import DONE, FOUND, Output, complain, exit_codes, json_file, output_file, policy, say
from ..users_function import users_function
from .cases import CASES, INPUTS, RETURNED, takes_batch_size, user_case
from .session import Plan
from .variants import VARIANTS, Setting

_SWEEP = [2**i for i in range(3, 11)]
_LARGEST = 2**31 - 1  # an int of C, which a number of steps or a batch size must fit into


def add_bench(commands: Any) -> None:
    """Add the command to the parser's."""
    bench = commands.add_parser(
        "bench",
        help="time a training step: torch's ways to write it, a bare capture, graphed_step",
        description="Train a model with each variant of the step, from the same weights on the same batches, one "
        "after another. Print what a step costs (time, GPU time, host time, set-up, memory) and if the losses agree.",
        epilog=f"{exit_codes('no variant could be measured')} If some variants failed, it is {DONE}, and a line on "
        "standard error says so. What was measured before Ctrl-C or an error is printed and written all the same.",
    )
    what = bench.add_argument_group("what to train")
    what.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help=f"{', '.join(CASES)}; or module:function, a function that takes the batch size or nothing and returns "
        f"{RETURNED}; default resnet18-cifar",
    )
    sizes = what.add_mutually_exclusive_group()
    sizes.add_argument(
        "-b", "--batch", "--batch-size", nargs="+", type=_positive, metavar="N", help="batch sizes; default 64"
    )
    sizes.add_argument("--sweep", action="store_true", help="batch sizes 8 to 1024, doubled, until memory ends")
    what.add_argument("--policy", type=policy, help="dtypes, see ampkit.Policy; default float16, on a CPU bfloat16")
    what.add_argument(
        "--input",
        choices=INPUTS,
        help=f"{'; '.join(f'{name}: {told}' for name, told in INPUTS.items())}; default prefetch",
    )
    how = bench.add_argument_group("how to measure")
    how.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    how.add_argument("--quick", action="store_true", help="small models, few variants and repeats: within 90 s")
    how.add_argument("--repeats", type=_positive, metavar="N", help="timed blocks per variant; default 7")
    how.add_argument("--seconds", type=_seconds, metavar="S", help="length of a block, about; default 0.3")
    how.add_argument("--no-profile", action="store_true", help="no GPU time; each variant is built once, not twice")
    how.add_argument(
        "--curves",
        type=_positive,
        metavar="STEPS",
        help="in place of times: losses of so many steps, eager and captured",
    )
    _add_results(bench.add_argument_group("results"))
    bench.set_defaults(run=_run_bench, parser=bench)


def _add_results(out: Any) -> None:
    out.add_argument(
        "--json", type=json_file, metavar="FILE", help="write the figures here; -: print them in place of the table"
    )
    out.add_argument("--plot", type=output_file, metavar="FILE", help="draw them into this image file")
    out.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="measure nothing, show what --json wrote")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int from 1 to {_LARGEST}")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")


def _run_bench(args: argparse.Namespace, output: Output) -> int:
    if args.plot is not None:
        _bench_plot.figure_class(args.plot)  # to see now that it can be drawn, and not when all is measured
    if args.read:
        _show(_bench_report.joined([_bench_report.read(path) for path in args.read]), args.plot, output)
        return DONE
    return _measure(args, output)


def _measure(args: argparse.Namespace, output: Output) -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    # A CPU takes many times as long for float16 as for bfloat16.
    dtypes = args.policy or Policy.parse("float16" if cuda else "bfloat16")
    plan, jobs = _plan(args, cuda), _jobs(args, cuda)
    setting = Setting(dtypes, device, args.input or "prefetch", args.curves or plan.checked)
    described = _bench.describe(setting, plan, shlex.join(["python", "-m", "ampkit", *args.argv]))
    if args.curves is None:
        keys, notes = _bench.select(args.variants, device, args.quick, args.sweep)
        if not keys:
            raise UsageError(f"--variants {' '.join(args.variants)}: none can be measured here. {' '.join(notes)}")
        figures = _bench_report.Figures(described, notes)
        _measure_times(figures, jobs, keys, setting, plan, args.plot, output)
        return _exit_code(figures, args.parser.prog)
    if len(jobs) != 1:
        raise UsageError(f"--curves: one model and one batch size, not {len(jobs)} of both.")
    (job,) = jobs
    curves = _bench_curves.run(job.model, job.make, setting, described)
    output.show(str(curves), curves.to_json())
    if args.plot is not None:
        _bench_curves.draw(curves, args.plot)
    return DONE


def _measure_times(
    figures: _bench_report.Figures,
    jobs: list[_bench.Job],
    keys: list[str],
    setting: Setting,
    plan: Plan,
    plot: Path | None,
    output: Output,
) -> None:
    """Measure and show the figures; if the run ends early, by Ctrl-C or an error, those that are finished by then."""
    try:
        _bench.run(figures, jobs, keys, setting, plan, lambda: output.save(figures.to_json()))
    except BaseException as error:
        figures.results = [result for result in figures.results if result.rows]
        figures.notes.append(f"Not complete: {type(error).__name__} ended the run early.")
        raise
    finally:
        if figures.results:
            _show(figures, plot if _measured(figures) else None, output)


def _measured(figures: _bench_report.Figures) -> int:
    """Return how many rows have a time."""
    return sum(row.ms is not None for _, row in _bench_report.cases(figures.results))


def _exit_code(figures: _bench_report.Figures, command: str) -> int:
    """Return the exit code of a run that came to its end, and say on standard error what failed in it."""
    rows, measured = len(_bench_report.cases(figures.results)), _measured(figures)
    if not measured:
        complain(command, "no variant could be measured. Each row of the table, or of the JSON, says why.")
        return FOUND
    if measured < rows:
        say(command, f"{rows - measured} of {rows} rows failed, and say why.")
    return DONE


def _plan(args: argparse.Namespace, cuda: bool) -> Plan:
    repeats, seconds = (3, 0.1) if args.quick else (7, 0.3)
    checked = 8 if args.quick and not cuda else 20
    return Plan(args.repeats or repeats, args.seconds or seconds, checked, not args.no_profile)


def _jobs(args: argparse.Namespace, cuda: bool) -> list[_bench.Job]:
    """Return a job for each model and batch size."""
    quick = ["mlp", "resnet18-cifar"] if cuda else ["mlp"]
    quick = ["resnet18-cifar"] if args.input == "uint8" else quick
    models = args.model or (quick if args.quick else ["resnet18-cifar"])
    batches = _SWEEP if args.sweep else sorted(args.batch or [64])
    return [job for model in models for job in _jobs_of(model, batches)]


def _jobs_of(model: str, batches: list[int]) -> list[_bench.Job]:
    """Return a job for each batch size; one for a function of the user's that takes none."""
    if model in CASES:
        return [_bench.Job(model, partial(CASES[model], batch), batch) for batch in batches]
    try:
        function = users_function(model, RETURNED, ["the batch size"])
    except UsageError as error:
        raise UsageError(f"--model {error} Models: {', '.join(CASES)}.") from None
    batches = batches if takes_batch_size(function) else batches[:1]
    return [_bench.Job(model, partial(user_case, model, function, batch), batch) for batch in batches]


def _show(figures: _bench_report.Figures, plot: Path | None, output: Output) -> None:
    output.show(_bench_report.table(figures), figures.to_json())
    if plot is not None:
        _bench_plot.draw(figures, plot)
