"""Arguments of `python -m ampkit`."""

import argparse
import importlib
import math
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import _bench, _bench_curves, _bench_plot, _bench_report
from ._bench_cases import CASES, INPUTS, RETURNED, CaseError, takes_batch_size, user_case
from ._bench_session import Plan
from ._bench_variants import VARIANTS, Setting
from ._doctor import RETURNED as DOCTOR_RETURNED
from ._doctor import RETURNED_LIGHTNING, DoctorError, diagnose
from ._errors import AmpkitError
from ._explain import explain
from ._op_table import DEVICE_TYPES, OpTable, op_table
from ._policy import Policy
from ._text import type_text

_SWEEP = [2**i for i in range(3, 11)]
_CALL = "(model, inputs) or (model, inputs, keyword arguments): a torch.nn.Module, a tuple or one tensor, a dict"


def _policy(text: str) -> Policy:
    try:
        return Policy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse hides the text of a ValueError


def _op_table(path: str) -> OpTable:
    try:
        return OpTable.from_json(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _CallError(Exception):
    """What `module:function` names cannot be used."""


def _function(text: str, returned: str) -> Callable[..., Any]:
    """Return the function that `module:function` names; `returned` says in messages what it is to return."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise _CallError(f"{text!r}: expected module:function, as in train:example.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (AttributeError, ImportError) as error:
        raise _CallError(f"{text!r}: {error}.") from error
    if not callable(make):
        raise _CallError(f"{text!r} is {type_text(make)}, expected a function that returns {returned}.")
    return make  # type: ignore[no-any-return]


def _call(text: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return what the function returns that `module:function` names, checked."""
    made = _function(text, _CALL)()
    wrong = _CallError(f"{text!r} returned {type_text(made)}, expected {_CALL}.")
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise wrong
    inputs, kwargs = made[1], made[2] if len(made) == 3 else {}
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, (tuple, list)) or not isinstance(kwargs, dict):
        raise wrong
    return made[0], tuple(inputs), kwargs


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` (default: the process's arguments) names."""
    parser = argparse.ArgumentParser(prog="python -m ampkit", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (_add_bench, _add_doctor, _add_ops, _add_explain):
        add(commands)
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    args.run(args)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time a training step: torch's ways to write it, a bare capture, graphed_step",
        description="Train a model with each variant of the step, from the same weights on the same batches, one "
        "after another. Print what a step costs (time, GPU time, host time, set-up, memory) and if the losses agree.",
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
    what.add_argument("--policy", type=_policy, help="dtypes, see ampkit.Policy; default float16, on a CPU bfloat16")
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
    out = bench.add_argument_group("results")
    out.add_argument(
        "--json", type=_file, metavar="FILE", help="write the figures here; -: print them in place of the table"
    )
    out.add_argument("--plot", type=_image, metavar="FILE", help="draw them into this image file")
    out.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="measure nothing, show what --json wrote")
    bench.set_defaults(run=_run_bench)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")


def _file(text: str) -> str:
    """Return the path of a file that can be written later, when hours of measurements depend on it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return text


def _image(text: str) -> Path:
    return Path(_file(text))


def _run_bench(args: argparse.Namespace) -> None:
    try:
        if args.read:
            _show(_bench_report.joined([_bench_report.read(path) for path in args.read]), args)
        else:
            _measure(args)
    except (AmpkitError, ImportError, OSError) as error:
        sys.exit(f"python -m ampkit bench: {error}")


def _measure(args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    # A CPU takes many times as long for float16 as for bfloat16.
    policy = args.policy or Policy.parse("float16" if cuda else "bfloat16")
    plan, jobs = _plan(args, cuda), _jobs(args, cuda)
    setting = Setting(policy, device, args.input or "prefetch", args.curves or plan.checked)
    described = _bench.describe(setting, plan, shlex.join(["python", "-m", "ampkit", *args.argv]))
    if args.curves is None:
        keys, notes = _bench.select(args.variants, device, args.quick, args.sweep)
        _measure_times(_bench_report.Figures(described, notes), jobs, keys, setting, plan, args)
    elif len(jobs) == 1:
        (job,) = jobs
        _show_curves(_bench_curves.run(job.model, job.make, setting, described), args)
    else:
        sys.exit(f"python -m ampkit bench --curves: one model and one batch size, not {len(jobs)} of both.")


def _measure_times(
    figures: _bench_report.Figures,
    jobs: list[_bench.Job],
    keys: list[str],
    setting: Setting,
    plan: Plan,
    args: argparse.Namespace,
) -> None:
    try:
        _bench.run(figures, jobs, keys, setting, plan, lambda: _save(figures, args.json), bar=args.json != "-")
    finally:  # what there is, also when the user has had enough
        if any(result.rows for result in figures.results):
            _show(figures, args)


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
        function = _function(model, RETURNED)
    except _CallError as error:
        raise CaseError(f"--model {error} Models: {', '.join(CASES)}.") from None
    batches = batches if takes_batch_size(function) else batches[:1]
    return [_bench.Job(model, partial(user_case, model, function, batch), batch) for batch in batches]


def _save(figures: _bench_report.Figures, path: str | None) -> None:
    if path is not None and path != "-":
        Path(path).write_text(figures.to_json())


def _show(figures: _bench_report.Figures, args: argparse.Namespace) -> None:
    _save(figures, args.json)
    print(figures.to_json().rstrip() if args.json == "-" else _bench_report.table(figures))
    if args.plot is not None:
        _bench_plot.draw(figures, args.plot)


def _show_curves(curves: _bench_curves.Curves, args: argparse.Namespace) -> None:
    if args.json is not None and args.json != "-":
        Path(args.json).write_text(curves.to_json())
    print(curves.to_json().rstrip() if args.json == "-" else curves)
    if args.plot is not None:
        _bench_curves.draw(curves, args.plot)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what keeps a training step from being captured, makes it slow or imprecise, by line",
        description="Train what the function returns for a few eager steps, and say which lines keep the step from "
        "being captured, make it slow or imprecise, and what to write instead. The exit status is 0 if there is "
        "nothing, 1 if there is something, 2 if it could not be run.",
    )
    doctor.add_argument("call", metavar="module:function", help=f"function that returns {DOCTOR_RETURNED}")
    doctor.add_argument("--lightning", action="store_true", help=f"the function returns {RETURNED_LIGHTNING}")
    doctor.add_argument("--json", metavar="FILE", help="also write the report here; -: print it in place of the text")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(args: argparse.Namespace) -> None:
    def find() -> Callable[..., Any]:
        try:
            return _function(args.call, RETURNED_LIGHTNING if args.lightning else DOCTOR_RETURNED)
        except _CallError as error:
            raise DoctorError(str(error)) from error

    try:
        found = diagnose(args.call, find, lightning=args.lightning, bar=args.json != "-")
        if args.json is not None and args.json != "-":
            Path(args.json).write_text(found.to_json())
    except (DoctorError, OSError) as error:
        print(f"python -m ampkit doctor: {error}", file=sys.stderr)
        sys.exit(2)
    print(found.to_json() if args.json == "-" else found)
    sys.exit(found.exit_code)


def _add_ops(commands: Any) -> None:
    ops = commands.add_parser(
        "ops",
        help="what autocast does to each operation in this torch",
        description="Print the autocast rule of every operation. With --diff, only what is different in another "
        "table; the exit status is 1 if there is a difference.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    ops.add_argument("--device", choices=sorted(DEVICE_TYPES), default="cuda", help="no such device is needed")
    ops.add_argument("--json", type=Path, default=None, help="also write the table to this file")
    ops.add_argument("--diff", type=_op_table, default=None, metavar="JSON", help="file that --json wrote, elsewhere")
    ops.set_defaults(run=_run_ops)


def _run_ops(args: argparse.Namespace) -> None:
    table = op_table(args.device)
    if args.json:
        args.json.write_text(table.to_json())
    if args.diff is None:
        print(table.table(shutil.get_terminal_size((100, 50)).columns))
        return
    try:
        changes = args.diff.diff(table)
    except ValueError as error:
        sys.exit(f"python -m ampkit ops: {error}")
    print(changes)
    if changes:
        print(_how_to_keep(changes.pins("float16")))
        sys.exit(1)


def _how_to_keep(pins: dict[str, str]) -> str:
    """Return the policy that keeps these rules, those aside whose operation no function of torch is named after."""
    kept = {}
    for op, rule in pins.items():
        with suppress(ValueError):
            Policy(ops={op: rule})
            kept[op] = rule
    return f"\nTo keep the old rules under float16: ampkit.Policy(compute='float16', ops={kept})" if kept else ""


def _add_explain(commands: Any) -> None:
    explaining = commands.add_parser(
        "explain",
        help="in which dtype each module's operations run, without a GPU",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    explaining.add_argument("call", metavar="module:function", help=f"function that returns {_CALL}")
    explaining.add_argument("--policy", type=_policy, default="float16", help="dtypes, see ampkit.Policy")
    explaining.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="no such device is needed")
    explaining.add_argument("--json", type=Path, default=None, help="also write it to this file")
    explaining.add_argument("--all", action="store_true", help="every row: repeated blocks too, any number of lines")
    explaining.set_defaults(run=_run_explain)


def _run_explain(args: argparse.Namespace) -> None:
    try:
        model, inputs, kwargs = _call(args.call)
    except _CallError as error:
        sys.exit(f"python -m ampkit explain: {error}")
    explanation = explain(model, *inputs, policy=args.policy, device_type=args.device, **kwargs)
    if args.json:
        args.json.write_text(explanation.to_json())
    print(explanation.table(all=args.all))


if __name__ == "__main__":
    main()
