"""What a policy does to a model, read off a run on fake tensors: dtypes, casts and bytes kept for backward."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .._arguments import check_choice, check_instance
from .._precision import module_rules as _module_rules
from .._text import dtype_name, grid, size_text
from .._torch.fake_tensors import is_limit_of_fake_tensors
from .._user_line import user_line
from .fake_tensors import can_save_for_backward, fake_copy, fake_device
from .op_recorder import Recorder, Row, Totals
from .policy import Policy, read_policy

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_Call = tuple[nn.Module, Any, Any]  # a model, its inputs and its keyword arguments
_UNKNOWN = "needs a CUDA build"
_COLUMNS = ("module", "operation", "in", "compute", "out", "runs", "casts", "kept")
_NUMBER = re.compile(r"(?:^|(?<=_))\d+$")  # a whole part of a path, or what follows its last underscore


@dataclass(frozen=True)
class Explanation:
    """What runs in which dtype in one forward pass, and what it costs. Prints as a table.

    Args:
        device_type: device that it was made for.
        policy: the policy, or "autocast as it was" where none was given.
        training: whether the model was in training mode.
        rows: the operations in the order of execution, each with `module` (path), `op`, `inputs` (dtypes before casts),
            `compute`, `output` (dtypes), `count`, `casts` and `saved_bytes`. Views and copies to another memory layout
            are not among them: they change no dtype.
        totals: `casts`, `cast_bytes` (read and written), `casts_back` (of these, those that backward casts a gradient
            back for) and `saved_bytes` (kept for backward; parameters and buffers are not counted, inputs are).
        float32: the same if everything ran in float32.
        stopped: None, or where and why the forward pass could not go on. The rows are complete up to there.
        saves: False where nothing could be known of backward: `saved_bytes` and `casts_back` are 0 then, and a weight
            that is used twice counts as cast twice. So it is for CUDA in a torch that was built without it.
    """

    device_type: str
    policy: str
    training: bool
    rows: tuple[Row, ...]
    totals: Totals
    float32: Totals
    stopped: str | None = None
    saves: bool = True

    def __str__(self) -> str:
        return self.table()

    def table(self, all: bool = False) -> str:
        """Return the table, as wide as the terminal.

        Args:
            all: every row. Otherwise rows of blocks that differ only by a number (`layers.0`, `layers.1`) are one row
                with a `*`, and of those only as many are shown as the terminal has lines.
        """
        size = shutil.get_terminal_size((100, 50))
        rows = list(self.rows) if all else _collapsed(self.rows)
        hidden = 0 if all else max(0, len(rows) - max(20, size.lines - 14))
        shown = rows[: len(rows) - hidden]
        mode = "training" if self.training else "evaluation"
        lines = [f"{self.policy} on {self.device_type}, {mode} mode", "", *_grid(shown, size.columns)]
        if hidden:
            left = sum(row.count for row in rows[len(shown) :])
            lines.append(f"... {hidden} more rows, {left} operations; .table(all=True) shows all")
        lines += ["", *self._footer()]
        if self.stopped:
            lines += ["", f"Stopped {self.stopped}"]
        return "\n".join(lines)

    def _footer(self) -> list[str]:
        runs = sum(row.count for row in self.rows)
        lines = [f"{'':24}{'this':>12}{'float32':>12}"]
        for name, mine, plain in (
            ("casts", str(self.totals.casts), str(self.float32.casts)),
            ("  of these back again", str(self.totals.casts_back), str(self.float32.casts_back)),
            ("bytes moved by casts", size_text(self.totals.cast_bytes), size_text(self.float32.cast_bytes)),
            ("kept for backward", size_text(self.totals.saved_bytes), size_text(self.float32.saved_bytes)),
        ):
            known = self.saves or name in ("casts", "bytes moved by casts")
            lines.append(f"{name:24}{mine:>12}{plain:>12}" if known else f"{name:24}{_UNKNOWN:>24}")
        used = sorted({dtype for row in self.rows for dtype in (*row.inputs, row.compute, row.output)}, key=str)
        lines.append(f"{runs} operations. " + ", ".join(f"{_short(dtype)}: {dtype_name(dtype)}" for dtype in used))
        return lines

    def to_json(self) -> str:
        """Return everything as JSON, dtypes by name, rows uncollapsed."""
        whole = {key: value for key, value in asdict(self).items() if key != "rows"}
        whole["rows"] = [
            {
                **asdict(row),
                "inputs": [dtype_name(dtype) for dtype in row.inputs],
                "compute": dtype_name(row.compute),
                "output": dtype_name(row.output),
            }
            for row in self.rows
        ]
        return json.dumps(whole, indent=1)


def explain(
    model: nn.Module,
    /,
    *inputs: Any,
    policy: Policy | str | None = None,
    device_type: str = "cuda",
    **kwargs: Any,
) -> Explanation:
    """Return which operations of `model(*inputs, **kwargs)` run in which dtype, without a GPU and without memory.

    Model and inputs are copied, without their data, to the device. The copy's forward pass runs, in the training or
    evaluation mode that the model is in; the model itself is not touched. Its parameters may be on any device, also on
    meta. A policy with `modules` or low-precision parameters is first applied to the copy (`Policy.apply`). Backward is
    not run: what it needs autograd saves in forward, and that is counted then. What torch.compile made is explained as
    the eager code that it was made of.

    Args:
        model: module to explain.
        *inputs: what it is called with; tensors in any containers, on any device.
        policy: `Policy`, or text that `Policy.parse` reads. None leaves autocast as the caller has set it.
        device_type: "cuda" (no GPU needed, but a torch that was built with CUDA) or "cpu".
        **kwargs: keyword arguments that it is called with.

    Raises:
        ValueError: an unknown policy or device type, or a model that cannot be copied.

    Sync: none. A model that reads the value of a tensor (`.item()`, `if tensor:`) cannot go on without data; then the
    explanation has the rows up to there, and says where it stopped.
    """
    check_instance("explain", "model", model, nn.Module, "a torch.nn.Module")
    check_choice("explain", "device_type", device_type, ("cuda", "cpu"))
    policy = read_policy("explain", policy)
    call = model, inputs, kwargs
    with fake_device(device_type):
        copied = _copied(call, device_type, None)
        if policy is not None and (policy.modules or policy.params is not torch.float32):
            policy.apply(copied[0])
        recorder, stopped = _record(copied, nullcontext() if policy is None else policy.autocast(device_type))
        plain, _ = _record(_copied(call, device_type, torch.float32), Policy().autocast(device_type))
    name = "autocast as it was" if policy is None else str(policy)
    return Explanation(
        device_type=device_type,
        policy=name,
        training=model.training,
        rows=recorder.rows(),
        totals=recorder.totals(),
        float32=plain.totals(),
        stopped=stopped,
        saves=can_save_for_backward(device_type),
    )


def _copied(call: _Call, device_type: str, dtype: torch.dtype | None) -> _Call:
    model, inputs, kwargs = call
    try:
        model, inputs, kwargs = fake_copy(call, device_type, dtype)
    except Exception as error:
        raise ValueError(f"explain: cannot copy {type(model).__name__} without its data: {error}") from error
    if dtype is not None:
        for module in model.modules():  # rules that the copy brought along would undo it
            if applied := vars(module).get(_module_rules.APPLIED):
                _module_rules.remove(module, applied.rules)
    return model, inputs, kwargs


def _record(call: _Call, autocast: AbstractContextManager[Any]) -> tuple[Recorder, str | None]:
    """Run a fake copy; return what was recorded, and where it stopped."""
    model, inputs, kwargs = call
    recorder = Recorder(model)
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), autocast, recorder:
        try:
            model(*inputs, **kwargs)
        except Exception as error:
            if not is_limit_of_fake_tensors(error):
                raise
            return recorder, f"in {recorder.module or 'the model itself'}: {_why(error)}"
    return recorder, None


def _why(error: Exception) -> str:
    """Return what went wrong, and the last line of code outside torch that led there."""
    where = f" ({line})" if (line := user_line(error)) else ""
    text = str(error).strip().splitlines()
    limit = "Fake tensors have no values and no device"
    if not torch.backends.cuda.is_built():
        limit = "This torch was built without CUDA; one built with it can go on, also without a GPU"
    return f"{type(error).__name__}: {text[0] if text else ''}{where}. {limit}."


def _collapsed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with those of repeated blocks merged into the first of them."""
    paths = {row.module for row in rows}
    inner = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."}
    patterns = {path: _pattern(path, inner) for path in paths}
    fits = Counter(patterns.values())
    merged: dict[Any, Row] = {}
    for row in rows:
        pattern = patterns[row.module]
        row = replace(row, module=pattern if fits[pattern] > 1 else row.module)
        first = merged.get(row.dtypes)
        merged[row.dtypes] = row if first is None else _sum(first, row)
    return list(merged.values())


def _pattern(path: str, inner: Set[str]) -> str:
    """Return the path with `*` for the numbers of blocks: of modules with others inside, as `layers.0` has."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if ".".join(path.split(".")[: i + 1]) in inner:
            parts[i] = _NUMBER.sub("*", part)
    return ".".join(parts)


def _sum(first: Row, row: Row) -> Row:
    return replace(
        first,
        count=first.count + row.count,
        casts=first.casts + row.casts,
        saved_bytes=first.saved_bytes + row.saved_bytes,
    )


def _grid(rows: Sequence[Row], width: int) -> list[str]:
    """Return a heading and a line a row, of at most `width` characters if the columns of numbers leave room."""
    return grid([_COLUMNS, *map(_cells, rows)], texts=5, width=width, shrink=[(0, 24), (1, 10), (0, 10)])


def _cells(row: Row) -> tuple[str, ...]:
    inputs = " ".join(map(_short, row.inputs))
    casts, kept = (str(row.casts) if row.casts else "", size_text(row.saved_bytes) if row.saved_bytes else "")
    return row.module or "(model)", row.op, inputs, _short(row.compute), _short(row.output), str(row.count), casts, kept


def _short(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, dtype_name(dtype))
