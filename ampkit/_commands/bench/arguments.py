"""The command `bench`: its arguments, the measurements they ask for, and the results of a run that ends early."""

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
from ..output import DONE, FOUND, Output, complain, exit_codes, json_file, policy, say
from ..users_function import takes, users_function
from . import measure as _bench
from . import report as _bench_report
from .cases import BATCH, BATCHES, CASES, INPUTS, RETURNED, user_case
from .session import Plan
from .variants import VARIANTS, Setting

_SWEEP = [2**i for i in range(3, 11)]
_LARGEST = 2**31 - 1  # a number of steps or a batch size must fit into an int of C


def add_bench(commands: Any) -> None:
    """Add the command `bench` to the parser's commands."""
    bench = commands.add_parser(
        "bench",
        help="time a training step in several variants: written with torch, captured by hand, graphed_step",
        description="Train a model with each variant of the step, one after another, from the same weights on the "
        "same batches. Print the cost of a step (time, GPU time, host time, set-up, memory) and whether losses agree.",
        epilog=f"{exit_codes('no variant could be measured')} If only some variants failed, the code is {DONE}, and a "
        "line on standard error says so. After Ctrl-C or an error, the figures so far are printed and written.",
    )
    _add_subject(bench.add_argument_group("what to train"))
    _add_measurement(bench.add_argument_group("how to measure"))
    results = bench.add_argument_group("results")
    results.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write the figures to this file; -: print them instead of the table",
    )
    results.add_argument(
        "--read",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing; show files that --json wrote, with --model, --batch or --variants only these of them",
    )
    bench.set_defaults(run=_run_bench, parser=bench)


def _add_subject(what: Any) -> None:
    what.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help=f"{', '.join(CASES)}; or module:function, a function that takes the batch size or nothing and returns "
        f"{RETURNED}; default: resnet18-cifar",
    )
    sizes = what.add_mutually_exclusive_group()
    sizes.add_argument(
        "-b",
        "--batch",
        "--batch-size",
        nargs="+",
        type=_positive,
        metavar="N",
        help="batch sizes; default: 64, of mlp-small 256",
    )
    sizes.add_argument("--sweep", action="store_true", help="batch sizes 8, 16, ... 1024, as far as memory suffices")
    what.add_argument("--policy", type=policy, help="dtypes, see ampkit.Policy; default: float16, on a CPU bfloat16")
    what.add_argument(
        "--input",
        choices=INPUTS,
        help=f"{'; '.join(f'{name}: {text}' for name, text in INPUTS.items())}; default: prefetch",
    )


def _add_measurement(how: Any) -> None:
    how.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"some of {', '.join(VARIANTS)}"
    )
    how.add_argument("--quick", action="store_true", help="small models, few variants and repeats; takes at most 90 s")
    how.add_argument("--repeats", type=_positive, metavar="N", help="number of timed blocks per variant; default: 7")
    how.add_argument("--seconds", type=_seconds, metavar="S", help="approximate length of a block; default: 0.3")
    how.add_argument(
        "--no-profile", action="store_true", help="do not measure GPU time, so each variant is built only once"
    )
    how.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="S",
        help="begin no variant later than this many seconds after the start; default: no limit",
    )
    how.add_argument(
        "--compiled-code",
        type=Path,
        metavar="FOLDER",
        help="keep compiled code there, for later runs; set-up times are then no longer those of a first run",
    )


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
    if args.read:
        figures = _bench_report.joined([_bench_report.read(path) for path in args.read])
        figures = _bench_report.chosen(figures, args.model, args.batch, args.variants)
        output.show(_bench_report.table(figures), figures.to_json())
        return DONE
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    repeats, seconds = (3, 0.1) if args.quick else (7, 0.3)
    plan = Plan(
        repeats=args.repeats or repeats,
        seconds=args.seconds or seconds,
        checked=8 if args.quick and not cuda else 20,
        profile=not args.no_profile,
        limit=args.time_limit or math.inf,
        compiled_code=None if args.compiled_code is None else args.compiled_code.absolute(),
    )
    setting = Setting(args.policy or usual_policy(device), device, args.input or "prefetch", plan.checked)
    keys, notes = _bench.select(args.variants, device, args.quick, args.sweep)
    if plan.compiled_code is not None:
        notes.append("Set-up times depend on what earlier runs have compiled, which --compiled-code has kept.")
    if not keys:
        raise UsageError(f"--variants {' '.join(args.variants)}: none can be measured here. {' '.join(notes)}")
    command = shlex.join(["python", "-m", "ampkit", *args.argv])
    figures = _bench_report.Figures(_bench.describe(setting, plan, command), notes)
    jobs = _jobs(args, cuda)
    try:
        _bench.run(figures, jobs, keys, setting, plan, lambda: output.save(figures.to_json()))
    except BaseException as error:  # Ctrl-C, too: the figures so far are shown
        figures.results = [result for result in figures.results if result.rows]
        figures.notes.append(f"Not complete: {type(error).__name__} ended the run early.")
        raise
    finally:
        if figures.results:
            output.show(_bench_report.table(figures), figures.to_json())
    rows = _bench_report.cases(figures.results)
    if (failed := sum(row.ms is None for _, row in rows)) == len(rows):
        complain(args.parser.prog, "no variant could be measured. Each row of the table, or of the JSON, says why.")
        return FOUND
    if failed:
        say(args.parser.prog, f"{failed} of {len(rows)} rows failed. Each of them says why.")
    return DONE


def usual_policy(device: torch.device) -> Policy:
    """Return the policy if none is given. A CPU computes float16 many times slower than bfloat16."""
    return Policy.parse("float16" if device.type == "cuda" else "bfloat16")


def _jobs(args: argparse.Namespace, cuda: bool) -> list[_bench.Job]:
    models = ["resnet18-cifar"]
    if args.quick and args.input != "uint8":  # which only images can be
        models = ["mlp", "resnet18-cifar"] if cuda else ["mlp"]
    given = _SWEEP if args.sweep else sorted(args.batch or [])
    return [job for model in args.model or models for job in jobs_of(model, given or [BATCHES.get(model, BATCH)])]


def jobs_of(model: str, batches: list[int]) -> list[_bench.Job]:
    """Return a job for each batch size, but only one for a user's function that takes no batch size."""
    if model in CASES:
        return [_bench.Job(model, partial(CASES[model], batch), batch) for batch in batches]
    try:
        function = users_function(model, RETURNED, ["the batch size"])
    except UsageError as error:
        raise UsageError(f"--model {error} Models: {', '.join(CASES)}.") from None
    batches = batches if takes(function, 1) else batches[:1]
    return [_bench.Job(model, partial(user_case, model, function, batch), batch) for batch in batches]
