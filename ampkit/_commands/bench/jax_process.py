"""Measures the step of an MLP in JAX, in a process of its own, from the same weights and on the same batches."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import UsageError
from ..._precision.policy import Policy
from . import jax_worker
from .cases import Case
from .session import Plan

_COMPUTE = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# Python would put the script's folder in front of all others, where `profile` is not that of the standard library.
_BY_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
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


def measure_jax(
    case: Case,
    plan: Plan,
    *,
    policy: Policy,
    device: torch.device,
    source: str,
    schedule: int,
    max_norm: float,
    steps_per_call: int,
) -> JaxFigures:
    """Train the case in JAX and measure that.

    Args:
        case: an MLP of `Case.widths`, with batches as the other variants take them.
        plan: how thoroughly to measure.
        policy: float32 weights; computes in bfloat16 or float32.
        device: trains the model.
        source: a key of `INPUTS`. With "device" the batches are put on the device once, else for each call.
        schedule: the rate falls to 0 in this many steps.
        max_norm: gradients are clipped to this norm.
        steps_per_call: how many steps `lax.scan` does in a call, 0 for one step per call without it.

    Raises:
        JaxError: the case cannot be trained in JAX, or the process failed. The message says why.
    """
    given = {
        **_options(case, policy),
        "layers": len(case.widths) - 1,
        "batches": len(case.batches),
        "schedule": schedule,
        "max_norm": max_norm,
        "steps_per_call": steps_per_call,
        "on_device": source == "device",
        "checked": plan.checked,
        "repeats": plan.repeats,
        "seconds": plan.seconds,
    }
    with tempfile.TemporaryDirectory(prefix="ampkit-bench-jax-") as folder:
        Path(folder, jax_worker.GIVEN).write_text(json.dumps(given))
        _save_arrays(case, Path(folder, jax_worker.ARRAYS))
        _run(folder, device)
        result = json.loads(Path(folder, jax_worker.RESULT).read_text())
    losses, ms, setup_s, peak_mib = [result.pop(name) for name in ("losses", "ms", "setup_s", "peak_mib")]
    return JaxFigures(losses, ms, setup_s, peak_mib, versions=result)


def _options(case: Case, policy: Policy) -> dict[str, Any]:
    """Return compute dtype, rate and options of the optimizer. Raise a `JaxError` if JAX would train something else."""
    if not case.widths:
        raise JaxError("in JAX only the MLPs are written: --model mlp-tiny, mlp-small or mlp-deep")
    if policy.params is not torch.float32 or policy.compute not in _COMPUTE or policy.ops or policy.modules:
        raise JaxError(f"in JAX the MLPs compute in bfloat16 or float32, with float32 weights, not {policy}")
    optimizer = case.optimizer(case.model.parameters())
    (group,) = optimizer.param_groups
    if type(optimizer) is not torch.optim.AdamW or group["amsgrad"] or group["maximize"]:
        raise JaxError(f"in JAX the MLPs are trained with AdamW, not with {type(optimizer).__name__}")
    b1, b2 = group["betas"]
    named = {"lr": group["lr"], "b1": b1, "b2": b2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
    return {"compute": _COMPUTE[policy.compute], **{name: float(value) for name, value in named.items()}}


def _save_arrays(case: Case, path: Path) -> None:
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
    command = [sys.executable, "-c", _BY_PATH, str(jax_worker.__file__), folder]
    try:
        done = subprocess.run(
            command, env=_environment(device), capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise JaxError(f"the process with JAX took more than {_TIMEOUT} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise JaxError(f"the process with JAX failed: {lines[-1]}")


def _environment(device: torch.device) -> dict[str, str]:
    """Return the environment of a process in which JAX has this device only, and leaves its memory to this one."""
    new = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu" if device.type == "cuda" else "cpu"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        index = device.index or 0
        new["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return {**os.environ, **new}
