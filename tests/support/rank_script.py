"""What scripts with cases for several ranks share: the work of one rank, and how two of its jobs are compared."""

import argparse
import faulthandler
import json
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_train import end, join, launch
from torch import Tensor


def run_rank(work: Callable[[torch.device], dict[str, Any]], device_type: str, timeout: float, how: str) -> None:
    """Join the other ranks, do the work, and print what it returned as a line of JSON.

    Args:
        work: what this rank does on its device.
        device_type: "cpu" or "cuda".
        timeout: seconds that the job may take. Where it hangs is printed before.
        how: the rank leaves the job, see `ddp_train.end`.
    """
    faulthandler.dump_traceback_later(max(1.0, timeout - 5))
    device = join(device_type)
    try:
        rows = work(device)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an interpreter that ends right after it joined sometimes aborts, as gloo's threads still run
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(rows), flush=True)
    end(how)


def rows_of(
    names: Iterable[str], compare: Callable[[str], dict[str, Any]], hidden: Collection[str] = ()
) -> dict[str, Any]:
    """Return a row for each case by its name. An error of one case does not keep the others from being tried.

    Args:
        names: of the cases.
        compare: returns the row of a case.
        hidden: what is left out where a row is printed.
    """
    rows: dict[str, Any] = {}
    for name in names:
        try:
            rows[name] = compare(name)
        except Exception as error:  # whatever it is, it is the finding
            traceback.print_exc()
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        shown = {key: value for key, value in rows[name].items() if value and key not in hidden}
        print(f"rank {dist.get_rank()}, {name}: {json.dumps(shown)[:900]}", flush=True)
        if "ROWS" in os.environ:  # where `ddp_train.Started` waits for it
            with open(os.environ["ROWS"], "a") as file:
                print(json.dumps(name), json.dumps(rows[name]), file=file)
    return rows


def differences(left: Any, right: Any) -> list[str]:
    """Return the names of what differs in any bit between two jobs, which have `state()`, `outputs` and `watch`."""
    first, second = left.state(), right.state()
    names = [name for name in first if name not in second or not same_bits(first[name], second[name])]
    for call, (a, b) in enumerate(zip(left.outputs, right.outputs, strict=True)):
        pairs = zip(a, b, strict=False)  # torch's loop returns the loss alone if there is no norm
        names += [f"output {i} of call {call}" for i, (x, y) in enumerate(pairs) if not same_bits(x, y)]
    if left.watch is not None and right.watch is not None:
        names += ["numerics"] if repr(left.watch.report().rows) != repr(right.watch.report().rows) else []
    return names


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same bits, except those of nan."""
    return left.dtype is right.dtype and torch.equal(left.cpu().nan_to_num(0.5), right.cpu().nan_to_num(0.5))


def main_of_cases(
    argv: Sequence[str],
    script: str,
    about: str,
    cases: Sequence[str],
    compare_all: Callable[[Sequence[str], torch.device], dict[str, Any]],
) -> int:
    """Run a script that compares cases on several ranks: launch them and print their rows, or be one of them."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=cases, default=list(cases))
    parser.add_argument("--timeout", type=float, default=240)
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        for rank, row in enumerate(launch(*argv, timeout=args.timeout, script=script)):
            for name, result in row.items():
                print(f"rank {rank}, {name}: {json.dumps(result)}")
        return 0
    torch.use_deterministic_algorithms(True)
    run_rank(partial(compare_all, args.cases), args.device, args.timeout, "destroy")
    return 0
