"""Arguments of `python -m ampkit`."""

import argparse
import importlib
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from . import _bench
from ._explain import explain
from ._op_table import DEVICE_TYPES, OpTable, op_table
from ._policy import Policy

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
    """What `module:function` names cannot be explained."""


def _call(text: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return what the function returns that `module:function` names, checked."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise _CallError(f"{text!r}: expected module:function, as in train:example.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (AttributeError, ImportError) as error:
        raise _CallError(f"{text!r}: {error}.") from error
    if not callable(make):
        raise _CallError(f"{text!r} is {_shape(make)}, expected a function that returns {_CALL}.")
    made = make()
    wrong = _CallError(f"{text!r} returned {_shape(made)}, expected {_CALL}.")
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise wrong
    inputs, kwargs = made[1], made[2] if len(made) == 3 else {}
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, (tuple, list)) or not isinstance(kwargs, dict):
        raise wrong
    return made[0], tuple(inputs), kwargs


def _shape(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` (default: the process's arguments) names."""
    parser = argparse.ArgumentParser(prog="python -m ampkit", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (_add_bench, _add_ops, _add_explain):
        add(commands)
    args = parser.parse_args(argv)
    args.run(args)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time a training step: torch AMP, bare capture, graphed_step",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.add_argument("--model", nargs="+", choices=sorted(_bench.CASES), default=["resnet18-cifar"])
    bench.add_argument("-b", "--batch-size", nargs="+", type=int, default=[64])
    bench.add_argument("--policy", type=_policy, default="float16", help="dtypes, see ampkit.Policy")
    bench.add_argument("--repeats", type=int, default=7)
    bench.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    bench.add_argument("--plot", type=Path, default=None, help="also draw them into this image file")
    bench.set_defaults(run=_run_bench)


def _run_bench(args: argparse.Namespace) -> None:
    try:
        _bench.run(args.model, args.batch_size, args.policy, args.repeats, args.json, args.plot)
    except _bench.NoDeviceError as error:
        sys.exit(f"python -m ampkit bench: {error}")


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
