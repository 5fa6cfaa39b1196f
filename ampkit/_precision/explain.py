"""What a policy does to a model: dtypes, casts and bytes kept for backward, found by a run on fake tensors."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .._arguments import check_choice, check_instance
from .._text import dtype_name, error_line, grid, size_text
from .._torch.tensors.fake_tensors import is_limit_of_fake_tensors
from .._user_line import user_line
from . import module_rules
from .fake_tensors import can_save_for_backward, fake_copy, fake_device
from .float8_layers import Float8Choice, noting_rows
from .op_recorder import ExplanationRow, OpRecorder, Totals, merged
from .policy import Policy, changes_model, read_policy

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_Layers = tuple[tuple[str, Float8Choice], ...]
_LAYER_COLUMNS = ("Linear layer", "computes in", "because", "rows x inputs x outputs", "ms", "ms in float8")
_UNKNOWN = "needs a CUDA build"
_COLUMNS = ("module", "operation", "in", "compute", "out", "runs", "casts", "kept")
_BLOCK_NUMBER = re.compile(r"(?:^|(?<=_))\d+$")  # in a part of a path: "3" in "3", "12" in "layer_12"
# Heading, sums and prompt take 14 lines of the terminal. A smaller terminal gets 20 rows all the same: it can scroll.
_OTHER_LINES, _LEAST_ROWS = 14, 20
# Where lines are too long, modules are shortened to 24 characters, then operations to 10, then modules to 10.
_SHRINK = ((0, 24), (1, 10), (0, 10))


@dataclass(frozen=True)
class Explanation:
    """What runs in which dtype in one forward pass, and what it costs. Prints as a table.

    Args:
        device_type: the device type that it was made for.
        policy: the policy, or "autocast as it was" if none was given.
        training: whether the model was in training mode.
        rows: the operations in the order of execution. Each has `module` (a path), `op`, `inputs` (dtypes before
            casts), `compute` and `output` (dtypes), `count`, `casts` and `saved_bytes`. Views and copies to another
            memory layout have no row, because they change no dtype.
        totals: `casts`, `cast_bytes` (read and written), `casts_back` (how many of the casts make backward cast a
            gradient back) and `saved_bytes` (kept for backward; inputs count, parameters and buffers do not).
        float32: the same figures if everything ran in float32.
        stopped: None, or where and why the forward pass could not go on. The rows are complete up to there.
        saves: False if nothing is known about backward, as for CUDA in a torch that was built without CUDA. Then
            `saved_bytes` and `casts_back` are 0, and a weight that is used twice counts as cast twice.
        layers: the Linear layers under a float8 rule: their paths, each with `form`, `reason`, `sizes` (rows, inputs,
            outputs) and `ms` (forward and backward without float8 and with it), the last two if a step has chosen.
    """

    device_type: str
    policy: str
    training: bool
    rows: tuple[ExplanationRow, ...]
    totals: Totals
    float32: Totals
    stopped: str | None = None
    saves: bool = True
    layers: _Layers = ()

    def table(self, all: bool = False) -> str:
        """Return the table, as wide as the terminal.

        Args:
            all: show every row. Otherwise the rows of blocks that differ in a number only (`layers.0`, `layers.1`) are
                one row with a `*`, and no more rows are shown than the terminal has lines for.
        """
        size = shutil.get_terminal_size((100, 50))
        rows = list(self.rows) if all else _collapsed(self.rows)
        hidden = 0 if all else max(0, len(rows) - max(_LEAST_ROWS, size.lines - _OTHER_LINES))
        shown = rows[: len(rows) - hidden]
        mode = "training" if self.training else "evaluation"
        used = sorted({dtype for row in self.rows for dtype in (*row.inputs, row.compute, row.output)}, key=str)
        short = {dtype: _SHORT.get(dtype, dtype_name(dtype)) for dtype in used}
        cells: list[tuple[str, ...]] = [_COLUMNS]
        for row in shown:
            dtypes = " ".join([short[dtype] for dtype in row.inputs]), short[row.compute], short[row.output]
            casts, kept = str(row.casts) if row.casts else "", size_text(row.saved_bytes) if row.saved_bytes else ""
            cells.append((row.module or "(model)", row.op, *dtypes, str(row.count), casts, kept))
        table = grid(cells, texts=5, width=size.columns, shrink=_SHRINK)
        lines = [f"{self.policy} on {self.device_type}, {mode} mode", "", *table]
        if hidden:
            left = sum(row.count for row in rows[len(shown) :])
            lines.append(f"... {hidden} more rows, {left} operations; .table(all=True) shows all")
        lines += ["", f"{'':24}{'this':>12}{'float32':>12}"]
        for name, mine, plain in (
            ("casts", str(self.totals.casts), str(self.float32.casts)),
            ("  of these back again", str(self.totals.casts_back), str(self.float32.casts_back)),
            ("bytes moved by casts", size_text(self.totals.cast_bytes), size_text(self.float32.cast_bytes)),
            ("kept for backward", size_text(self.totals.saved_bytes), size_text(self.float32.saved_bytes)),
        ):
            known = self.saves or name in ("casts", "bytes moved by casts")
            lines.append(f"{name:24}{mine:>12}{plain:>12}" if known else f"{name:24}{_UNKNOWN:>24}")
        runs = sum(row.count for row in self.rows)
        lines.append(f"{runs} operations. " + ", ".join(f"{short[dtype]}: {dtype_name(dtype)}" for dtype in used))
        if self.layers:
            lines += ["", *grid(_layer_cells(self.layers, all), texts=2, width=size.columns)]
        if self.stopped:
            lines += ["", f"Stopped {self.stopped}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return everything as JSON, with every row and the names of dtypes."""
        whole = asdict(self)
        whole["rows"] = whole.pop("rows")  # at the end
        return json.dumps(whole, indent=1, default=dtype_name)


def explain(
    model: nn.Module,
    /,
    *inputs: Any,
    policy: Policy | str | None = None,
    device_type: str = "cuda",
    **kwargs: Any,
) -> Explanation:
    """Return which operations of `model(*inputs, **kwargs)` run in which dtype, without a GPU and without memory.

    The model and the inputs are copied without their data, and the copy's forward pass runs, in training or evaluation
    mode like the model. The model itself is not touched, and its parameters may be on any device, also on meta. A
    policy with `modules` or low-precision parameters is applied to the copy first (`Policy.apply`). Backward does not
    run. Autograd saves in forward what backward needs, and that is counted. Compiled code is explained as the eager
    code that it was compiled from.

    Args:
        model: module to explain.
        *inputs: its arguments. Tensors may be in any containers and on any device.
        policy: `Policy`, or text that `Policy.parse` reads. None leaves autocast as the caller has set it.
        device_type: "cuda" or "cpu". "cuda" needs no GPU, but a torch that was built with CUDA.
        **kwargs: its keyword arguments.

    Raises:
        ValueError: an unknown policy or device type, or a model that cannot be copied.

    Sync: none. A model that reads the value of a tensor (`.item()`, `if tensor:`) cannot go on without data. The
    explanation then has the rows up to there, and says where it stopped.
    """
    check_instance("explain", "model", model, nn.Module, "a torch.nn.Module")
    check_choice("explain", "device_type", device_type, ("cuda", "cpu"))
    policy = read_policy("explain", policy)
    call = model, inputs, kwargs
    with fake_device(device_type):
        recorder, stopped, layers = _recorded(call, device_type, policy)
        plain, *_ = _recorded(call, device_type, Policy(), torch.float32)
    return Explanation(
        device_type=device_type,
        policy="autocast as it was" if policy is None else str(policy),
        training=model.training,
        rows=recorder.rows(),
        totals=recorder.totals(),
        float32=plain.totals(),
        stopped=stopped,
        layers=layers,
        saves=can_save_for_backward(device_type),
    )


def _recorded(
    call: tuple[nn.Module, Any, Any], device_type: str, policy: Policy | None, dtype: torch.dtype | None = None
) -> tuple[OpRecorder, str | None, _Layers]:
    """Run a fake copy of a model and its arguments.

    Return the recorder, where the run stopped, None if nowhere, and the layers under float8 rules.
    """
    model, inputs, kwargs = call
    try:
        model, inputs, kwargs = fake_copy(call, device_type, dtype)
    except Exception as error:
        raise ValueError(f"explain: cannot copy {type(model).__name__} without its data: {error}") from error
    if dtype is not None:
        for module in model.modules():  # a policy that the model has would cast the copy to other dtypes
            if applied := vars(module).get(module_rules.APPLIED):
                module_rules.remove(module, applied.rules)
    if policy is not None and changes_model(policy):
        policy.apply(model)
    autocast = nullcontext() if policy is None else policy.autocast(device_type)
    recorder = OpRecorder(model)
    with (
        noting_rows() as rows,
        torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
        autocast,
        recorder,
    ):
        try:
            model(*inputs, **kwargs)
        except Exception as error:
            if not is_limit_of_fake_tensors(error):
                raise
            line = f" ({line})" if (line := user_line(error)) else ""
            limit = "Fake tensors have no values and no device"
            if not torch.backends.cuda.is_built():
                limit = "This torch was built without CUDA; one built with it can go on, also without a GPU"
            stopped = f"in {recorder.module or 'the model itself'}: {error_line(error)}{line}. {limit}."
            return recorder, stopped, _layers(model, rows)
    return recorder, None, _layers(model, rows)


def _layers(model: nn.Module, rows: Mapping[nn.Module, int]) -> _Layers:
    """Return the layers of a model under float8 rules. Those that are not chosen get the sizes that were seen."""
    found = []
    for prefix, module in model.named_modules():
        for path, choice in module_rules.float8_layers(module).items():
            layer: Any = module.get_submodule(path)
            if layer in rows:
                choice = choice._replace(sizes=(rows[layer], layer.in_features, layer.out_features))
            found.append((f"{prefix}.{path}".strip("."), choice))
    return tuple(found)


def _layer_cells(layers: _Layers, all: bool) -> list[tuple[str, ...]]:
    """Return the table of Linear layers, with one row for those in blocks that differ in a number only."""
    groups: dict[Any, list[str]] = {}
    for path, choice in layers:
        groups.setdefault((path if all else re.sub(r"\d+(?=.*\.)", "*", path), choice), []).append(path)
    cells: list[tuple[str, ...]] = [_LAYER_COLUMNS]
    for (pattern, choice), paths in groups.items():
        times = [f"{ms:.3f}" for ms in choice.ms or ()] or ["", ""]
        sizes = " x ".join(map(str, choice.sizes or ()))
        cells.append((pattern if len(paths) > 1 else paths[0], choice.form, choice.reason, sizes, *times))
    return cells


def _collapsed(rows: Sequence[ExplanationRow]) -> list[ExplanationRow]:
    """Return the rows with one row for equal ones of repeated blocks.

    Blocks are modules that have others inside (`layers.0`). Their paths have a `*` for their numbers.
    """
    paths = {row.module for row in rows}
    blocks = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."}
    patterns: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")
        starred = (
            _BLOCK_NUMBER.sub("*", part) if ".".join(parts[: i + 1]) in blocks else part for i, part in enumerate(parts)
        )
        patterns[path] = ".".join(starred)
    fits = Counter(patterns.values())
    groups: dict[Any, list[ExplanationRow]] = {}
    for row in rows:
        pattern = patterns[row.module]
        row = replace(row, module=pattern if fits[pattern] > 1 else row.module)
        groups.setdefault(row.dtypes, []).append(row)
    return list(map(merged, groups.values()))
