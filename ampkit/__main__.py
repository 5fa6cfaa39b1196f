"""The arguments of `python -m ampkit`, and the exit code and message that each error of a command leads to."""

import argparse
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from . import __version__
from ._commands.bench.arguments import add_bench
from ._commands.bench.report import is_out_of_memory
from ._commands.doctor.doctor import diagnose
from ._commands.doctor.subjects import RETURNED as DOCTOR_RETURNED
from ._commands.doctor.subjects import RETURNED_LIGHTNING
from ._commands.environment import Environment
from ._commands.output import (
    DONE,
    FOUND,
    INTERRUPTED,
    NO_READER,
    POLICY,
    TROUBLE,
    USERS_ERROR,
    Output,
    Parser,
    complain,
    exit_codes,
    json_file,
    policy,
    say,
)
from ._commands.trace import add_trace
from ._commands.users_function import CALL, users_function
from ._errors import AmpkitError, UsageError
from ._precision.explain import explain
from ._precision.op_table import DEVICE_TYPES, OpTable, op_table
from ._precision.policy import Policy
from ._text import type_text
from ._user_line import user_line, users_traceback

_CALL = "(model, inputs) or (model, inputs, keyword arguments): a torch.nn.Module, a tuple or one tensor, a dict"
_JSON = "also write the result to this file; -: print the JSON instead of the text"


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` names (default: the process's arguments), and return its exit code.

    This function raises nothing. It prints each error to standard error. `_commands/output.py` lists the exit codes.
    """
    try:
        parser = Parser(
            prog="python -m ampkit", epilog=exit_codes("the command found something bad, which its own help describes")
        )
        parser.add_argument("--version", action="version", version=f"ampkit {__version__}")
        commands = parser.add_subparsers(required=True, metavar="command")
        for add in (add_bench, _add_doctor, add_trace, _add_ops, _add_explain, _add_env):
            add(commands)
        argv = sys.argv[1:] if argv is None else argv
        if not argv:
            parser.print_help(sys.stderr)
            return TROUBLE
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.argv = argv
    except SystemExit as ended:  # of --help, of --version, or after a message about wrong arguments
        return int(ended.code or DONE)
    try:
        with Output(args.json) as output:
            return args.run(args, output)  # type: ignore[no-any-return]  # each runner returns its exit code
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return _ended_by(error, args.parser.prog)


def _ended_by(error: BaseException, command: str) -> int:
    """Print what ended a command early, and return the exit code for it."""
    if any(isinstance(part, KeyboardInterrupt) for part in _chain(error)):  # Lightning turns it into a SystemExit
        say(command, "interrupted.")
        return INTERRUPTED
    for part in _chain(error, implicit=False):
        if traceback_text := users_traceback(part):
            print(f"Your lines in the traceback, the innermost last:\n{traceback_text}", end="", file=sys.stderr)
            where = f" ({line})" if (line := user_line(part)) else ""
            first = (str(part).splitlines() or [""])[0]
            complain(command, f"your code raised {type(part).__name__}: {first}{where}")
            return USERS_ERROR
    if isinstance(error, BrokenPipeError):
        return NO_READER
    if isinstance(error, OSError) and error.filename is not None:
        complain(command, f"{error.filename}: {error.strerror}")
    # These messages are complete: a ValueError of ampkit names a wrong argument, an ImportError an optional package.
    elif isinstance(error, (AmpkitError, ValueError, OSError, ImportError)):
        complain(command, str(error))
    elif is_out_of_memory(error):
        first = (str(error).splitlines() or [""])[0]
        complain(command, f"out of memory, take a smaller model or batch: {first}")
    else:
        traceback.print_exception(error)
        complain(command, "this is a defect of ampkit. Report it with these lines and with `python -m ampkit env`.")
    return TROUBLE


def _chain(error: BaseException | None, implicit: bool = True) -> Iterator[BaseException]:
    """Yield an error and its causes; if `implicit`, also the errors that were being handled when these were raised."""
    while error is not None:
        yield error
        error = error.__cause__ or (error.__context__ if implicit else None)


# --------------------------------------------------------------------------------------------------------------- doctor


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find the lines that keep a training step from being captured, or make it slow or imprecise",
        description="Train the loop that the function returns for a few eager steps. Report the lines that keep the "
        "step from being captured, or make it slow or imprecise, and what to write instead.",
        epilog=exit_codes("there are findings"),
    )
    doctor.add_argument("call", metavar=CALL, help=f"function that returns {DOCTOR_RETURNED}")
    doctor.add_argument("--lightning", action="store_true", help=f"the function returns {RETURNED_LIGHTNING}")
    doctor.add_argument("--policy", type=policy, help=POLICY)
    doctor.add_argument("--json", type=json_file, metavar="FILE", help=_JSON)
    doctor.set_defaults(run=_run_doctor, parser=doctor)


def _run_doctor(args: argparse.Namespace, output: Output) -> int:
    returned = RETURNED_LIGHTNING if args.lightning else DOCTOR_RETURNED
    found = diagnose(args.call, lambda: users_function(args.call, returned), args.policy, lightning=args.lightning)
    output.show(str(found), found.to_json())
    return found.exit_code


# ------------------------------------------------------------------------------------------------------------------ ops


def _add_ops(commands: Any) -> None:
    ops = commands.add_parser(
        "ops",
        help="print the rule of autocast for each operation in this torch",
        description="Print the autocast rule of every operation. With --diff, print only what differs from another "
        "table.",
        epilog=exit_codes("--diff finds a difference"),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    ops.add_argument("--device", choices=sorted(DEVICE_TYPES), default="cuda", help="type of device; none is needed")
    ops.add_argument("--json", type=json_file, default=None, metavar="FILE", help=_JSON)
    ops.add_argument(
        "--diff", type=_op_table_file, default=None, metavar="JSON", help="file that --json wrote with another torch"
    )
    ops.set_defaults(run=_run_ops, parser=ops)


def _op_table_file(path: str) -> OpTable:
    try:
        return OpTable.from_json(Path(path).read_text())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path!r}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path!r}: {error}") from None


def _run_ops(args: argparse.Namespace, output: Output) -> int:
    table = op_table(args.device)
    if args.diff is None:
        output.show(table.table(shutil.get_terminal_size((100, 50)).columns), table.to_json())
        return DONE
    changes = args.diff.diff(table)
    output.save(table.to_json())
    print(changes)
    if not changes:
        return DONE
    kept = {}
    for op, rule in changes.pins("float16").items():
        with suppress(ValueError):  # an operation that is not named like a function of torch
            Policy(ops={op: rule})
            kept[op] = rule
    print(f"\nTo keep the old rules under float16: ampkit.Policy(compute='float16', ops={kept})" if kept else "")
    return FOUND


# -------------------------------------------------------------------------------------------------------------- explain


def _add_explain(commands: Any) -> None:
    explaining = commands.add_parser(
        "explain",
        help="show the dtypes in which each module's operations run, without a GPU",
        epilog=exit_codes(),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    explaining.add_argument("call", metavar=CALL, help=f"function that returns {_CALL}")
    explaining.add_argument("--policy", type=policy, default="float16", help="dtypes, see ampkit.Policy")
    explaining.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="type of device; none is needed")
    explaining.add_argument("--json", type=json_file, default=None, metavar="FILE", help=_JSON)
    explaining.add_argument("--all", action="store_true", help="show every row, also those of repeated blocks")
    explaining.set_defaults(run=_run_explain, parser=explaining)


def _run_explain(args: argparse.Namespace, output: Output) -> int:
    made = users_function(args.call, _CALL)()
    wrong = UsageError(f"{args.call!r} returned {type_text(made)}, expected {_CALL}.")
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise wrong
    model, inputs, kwargs = made if len(made) == 3 else (*made, {})
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, (tuple, list)) or not isinstance(kwargs, dict):
        raise wrong
    try:
        explanation = explain(model, *inputs, policy=args.policy, device_type=args.device, **kwargs)
    except Exception as error:  # of the user's model
        raise UsageError(f"{args.call}: {type(error).__name__}: {error}") from error
    output.show(explanation.table(all=args.all), explanation.to_json())
    return DONE


# ------------------------------------------------------------------------------------------------------------------ env


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="print what a bug report needs: versions, GPUs, driver, variables and settings that decide kernels",
        description="Print the machine and software that ampkit runs on, for a bug report. Only a fixed list of "
        "environment variables is read, and no names of users, hosts or folders.",
        epilog=exit_codes(),
    )
    env.add_argument("--json", type=json_file, metavar="FILE", help=_JSON)
    env.set_defaults(run=_run_env, parser=env)


def _run_env(args: argparse.Namespace, output: Output) -> int:
    found = Environment(__version__)
    output.show(str(found), found.to_json())
    return DONE


if __name__ == "__main__":
    sys.exit(main())
