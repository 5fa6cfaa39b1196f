"""The command `trace`: profiles replays of the step that `module:function` returns, and names their kernels."""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .._capture.graph.profiled_calls import read_trace
from .._errors import AmpkitError
from .._text import ProgressBar
from ..debug._kernels.name_kernels import name_kernels
from ..debug._kernels.named_trace import NamedTrace
from .doctor.subjects import RETURNED, RETURNED_LIGHTNING, load_subject
from .doctor.trial import Subject, Trial
from .output import DONE, FOUND, POLICY, Output, exit_codes, json_file, output_file, policy
from .users_function import CALL, users_function

_MOST_STEPS = 40  # before the first replay; a layout takes a warm-up of a few
_FEW_NAMED = 0.95  # of the time: below it the names are no picture of the step


class TraceError(AmpkitError):
    """The step has no replay to profile."""


def add_trace(commands: Any) -> None:
    """Add the command to those of `python -m ampkit`."""
    trace = commands.add_parser(
        "trace",
        help="profile a replay of a training step, with module names over its kernels",
        description="Train the loop that the function returns on its first batch until its step is a graph. Profile "
        "replays, and write a trace with module names over the kernels, for Perfetto or chrome://tracing. Without a "
        "GPU the graph is emulated, and operations of the CPU stand in for kernels.",
        epilog=exit_codes(f"less than {_FEW_NAMED:.0%} of the kernels' time has a name"),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    trace.add_argument("call", metavar=CALL, help=f"function that returns {RETURNED}")
    trace.add_argument(
        "-o", "--output", type=output_file, required=True, metavar="FILE", help="where to write the trace"
    )
    trace.add_argument("--replays", type=_positive, default=2, help="how many optimizer steps to profile")
    trace.add_argument("--depth", type=_positive, default=1, help="how many parts of a module's path the table shows")
    trace.add_argument("--policy", type=policy, help=POLICY)
    trace.add_argument("--lightning", action="store_true", help=f"the function returns {RETURNED_LIGHTNING}")
    trace.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="also write the table of all modules to this file; -: print it as JSON instead of the text",
    )
    trace.set_defaults(run=_run_trace, parser=trace)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return int(text)


def _run_trace(args: argparse.Namespace, output: Output) -> int:
    returned = RETURNED_LIGHTNING if args.lightning else RETURNED
    subject = load_subject(args.call, lambda: users_function(args.call, returned), args.policy, args.lightning)
    named = traced(subject, args.replays)
    named.save(args.output)
    emulated = (subject.device or next(subject.model.parameters()).device).type != "cuda"
    said = ["emulated: operations of the CPU stand in for kernels, and their times say nothing of a GPU"] * emulated
    text = "\n".join([named.text(args.depth), *said, f"written to {args.output}"])
    output.show(text, json.dumps(named.to_dict(), indent=1))
    return DONE if named.named_share >= _FEW_NAMED else FOUND


def traced(subject: Subject, replays: int) -> NamedTrace:
    """Train until optimizer steps are replays, profile some of these, and name their kernels.

    The model is trained on its first batch.

    Raises:
        CaptureError: the step cannot be captured.
        TraceError: steps do not become replays.
    """
    progress = ProgressBar(3)
    try:
        progress.show("the first batch")
        trial = Trial(subject)
        args, kwargs = trial.kept[0]
        on_cuda = trial.device.type == "cuda"
        graph = "auto" if on_cuda else "emulate"
        # A scheduler may have few steps left, and the rate changes no kernel.
        with subject.step(scheduler=None, annotate=True, on_failure="raise", graph=graph) as step:
            micro_batches = subject.options.get("accumulate", 1)

            def optimizer_step() -> None:
                for _ in range(micro_batches):
                    step(*args, **kwargs)

            progress.show("warm-up and capture")
            for _ in range(_MOST_STEPS):
                before = step.captures, step.replays + micro_batches
                optimizer_step()
                if (step.captures, step.replays) == before:
                    break
            else:
                raise TraceError(
                    f"after {_MOST_STEPS} steps on one batch there is no step that is a replay:\n{step.report()}"
                )
            progress.show("the profile")
            return name_kernels(_profiled(optimizer_step, replays, on_cuda), step)
    finally:
        progress.clear()


def _profiled(optimizer_step: Callable[[], None], steps: int, on_cuda: bool) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            optimizer_step()
        if on_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="ampkit-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
