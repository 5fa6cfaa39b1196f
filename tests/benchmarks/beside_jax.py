"""The step of the small MLPs in JAX, in a process of its own, beside what `python -m ampkit bench` has measured.

    python -m ampkit bench --model mlp-tiny mlp-small mlp-deep --policy bfloat16 --input device \\
        --variants amp graphed scan --json figures.json
    python tests/benchmarks/beside_jax.py figures.json

It measures on the same kind of device, with the settings of the file, from the same weights and on the same batches.
The rows are added to the file, and the tables are printed with them. It needs jax and optax.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax_worker
import torch
from torch import nn

from ampkit._commands.bench.cases import CASES, Case, ready
from ampkit._commands.bench.losses import Expectations
from ampkit._commands.bench.measure import describe
from ampkit._commands.bench.process import fast_kernels
from ampkit._commands.bench.report import Figures, FiguresError, Row, error_text, joined, read, table
from ampkit._commands.bench.session import Plan, TimedLoop
from ampkit._commands.bench.variants import MAX_NORM, Setting
from ampkit._errors import UsageError
from ampkit._precision.policy import Policy

# Name in the file, its name in tables, and how many steps `lax.scan` does in a call; 0 for one without it.
VARIANTS = (("jax-jit", "JAX, jit", 0), ("jax-scan", "JAX, lax.scan of 100", 100))
_PER_VARIANT = ("repeats", "seconds_per_repeat")
_COMPUTE = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_TIMEOUT = 900  # seconds; to compile takes less than 60


class JaxError(UsageError):
    """The case cannot be trained in JAX, or the process that did so has failed."""


class JaxFigures(NamedTuple):
    """What a process measured.

    Attributes:
        losses: of the checked steps, one by one.
        ms: milliseconds per step, one number per repeat.
        setup_s: see `Row`.
        peak_mib: device memory at the peak of the process, None if JAX does not tell.
        versions: of jax and optax, and the device.
    """

    losses: list[float]
    ms: list[float]
    setup_s: float
    peak_mib: float | None
    versions: dict[str, str]


def has_jax() -> bool:
    """Return whether jax, optax and numpy are installed. Imports none of them."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "optax", "numpy"))


def add(figures: Figures) -> None:
    """Measure the MLPs of the figures in JAX, and add the rows. A row that JAX cannot train says why.

    Raises:
        FiguresError: the figures are of another device, or of another torch.
    """
    given = figures.setting
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    setting = Setting(Policy.parse(given["policy"]), device, given["input"], given["checked_steps"])
    # A file of several runs has the least and the most of them.
    repeats, seconds = (max(given[key]) if isinstance(given[key], list) else given[key] for key in _PER_VARIANT)
    plan = Plan(repeats, seconds, given["checked_steps"])
    joined([figures, Figures(describe(setting, plan, ""))])
    for result in figures.results:
        if result.model not in CASES:
            continue
        case = CASES[result.model](result.batch)
        with fast_kernels(device):
            case = ready(case, setting.policy.params, device, setting.source)
            known = Expectations(case, setting, plan, figures.notes).of(True)
        for name, label, steps_per_call in VARIANTS:
            row = Row(name, label)
            result.rows.append(row)
            try:
                found = measure(case, setting, plan, steps_per_call)
            except JaxError as error:
                row.error = error_text(error)
                continue
            row.ms, row.fastest, row.slowest = statistics.median(found.ms), min(found.ms), max(found.ms)
            row.setup_s, row.peak_mib, row.report = found.setup_s, found.peak_mib, {**found.versions}
            ends = TimedLoop(case.batches, device, plan).ends
            losses = [statistics.fmean(found.losses[end - ends.step : end]) for end in ends]
            row.loss = losses[-1]
            if known is not None:
                known.judge(losses, row)


def measure(case: Case, setting: Setting, plan: Plan, steps_per_call: int) -> JaxFigures:
    """Train the case in JAX and measure that.

    Args:
        case: an MLP, with batches as the variants of torch take them.
        setting: float32 weights; computes in bfloat16 or float32. If batches do not lie on the device, each call puts
            them there.
        plan: how thoroughly to measure.
        steps_per_call: how many steps `lax.scan` does in a call, 0 for one step per call without it.

    Raises:
        JaxError: the case cannot be trained in JAX, or the process failed. The message says why.
    """
    given = {
        **options(case, setting.policy),
        "batches": len(case.batches),
        "schedule": setting.schedule,
        "max_norm": MAX_NORM,
        "steps_per_call": steps_per_call,
        "on_device": setting.source == "device",
        "checked": plan.checked,
        "repeats": plan.repeats,
        "seconds": plan.seconds,
    }
    with tempfile.TemporaryDirectory(prefix="ampkit-bench-jax-") as folder:
        Path(folder, jax_worker.GIVEN).write_text(json.dumps(given))
        save_arrays(case, Path(folder, jax_worker.ARRAYS))
        _run(folder, setting.device)
        result = json.loads(Path(folder, jax_worker.RESULT).read_text())
    losses, ms, setup_s, peak_mib = [result.pop(name) for name in ("losses", "ms", "setup_s", "peak_mib")]
    return JaxFigures(losses, ms, setup_s, peak_mib, versions=result)


def options(case: Case, policy: Policy) -> dict[str, Any]:
    """Return compute dtype, number of layers, rate and options of the optimizer.

    Raises:
        JaxError: JAX would train something else.
    """
    kinds = [type(part) for part in case.model] if type(case.model) is nn.Sequential else []
    if not kinds or kinds != list(itertools.islice(itertools.cycle([nn.Linear, nn.ReLU]), len(kinds) // 2 * 2 + 1)):
        raise JaxError("in JAX only MLPs are written: mlp-tiny, mlp-small and mlp-deep")
    if policy.params is not torch.float32 or policy.compute not in _COMPUTE or policy.ops or policy.modules:
        raise JaxError(f"in JAX the MLPs compute in bfloat16 or float32, with float32 weights, not {policy}")
    optimizer = case.optimizer(case.model.parameters())
    (group,) = optimizer.param_groups
    if type(optimizer) is not torch.optim.AdamW or group["amsgrad"] or group["maximize"]:
        raise JaxError(f"in JAX the MLPs are trained with AdamW, not with {type(optimizer).__name__}")
    b1, b2 = group["betas"]
    named = {"lr": group["lr"], "b1": b1, "b2": b2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
    return {
        "compute": _COMPUTE[policy.compute],
        "layers": len(kinds) // 2 + 1,
        **{name: float(value) for name, value in named.items()},
    }


def save_arrays(case: Case, path: Path) -> None:
    import numpy

    arrays: dict[str, Any] = {}
    layers = [module for module in case.model.modules() if isinstance(module, nn.Linear)]
    for i, layer in enumerate(layers):
        arrays[f"weight{i}"] = layer.weight.detach().t().contiguous().numpy()  # JAX multiplies x @ weight
        arrays[f"bias{i}"] = layer.bias.detach().numpy()
    for i, (inputs, targets) in enumerate(case.batches):
        arrays[f"inputs{i}"] = inputs.cpu().numpy()
        arrays[f"targets{i}"] = targets.int().cpu().numpy()  # JAX has 32 bits by default
    numpy.savez(path, **arrays)


def _run(folder: str, device: torch.device) -> None:
    """Run the worker by its path. So it imports neither ampkit nor torch, whose CUDA libraries may not be JAX's."""
    command = [sys.executable, str(jax_worker.__file__), folder]
    try:
        done = subprocess.run(
            command, env=environment(device), capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise JaxError(f"the process with JAX took more than {_TIMEOUT} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise JaxError(f"the process with JAX failed: {lines[-1]}")


def environment(device: torch.device) -> dict[str, str]:
    """Return the environment of a process in which JAX has this device only, and leaves its memory to this one."""
    new = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu" if device.type == "cuda" else "cpu"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        index = device.index or 0
        new["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return {**os.environ, **new}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what `python -m ampkit bench --json` wrote")
    file = parser.parse_args(argv).file
    if not has_jax():
        sys.exit(f"{parser.prog}: error: it needs jax and optax: pip install jax optax")
    try:
        figures = read(file)
        add(figures)
    except (FiguresError, OSError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    file.write_text(figures.to_json())
    print(table(figures))


if __name__ == "__main__":
    main()
