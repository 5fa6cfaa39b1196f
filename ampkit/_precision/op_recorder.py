"""Which operations ran, in which module and in which dtypes: watched below autograd and autocast."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from .._torch.compile import without_compiled_code
from .._torch.modes import TorchDispatchMode
from .._torch.operators import METADATA_OPS
from .._torch.tree import tensors_in

# One operation that has another name on each backend; which one runs is the device's choice and changes no dtype.
ONE_NAME = {
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"), "batch_norm"),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), "batch_norm"),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update"), "batch_norm"),
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
}
# Whether these run depends on strides, which kernels of one operation choose differently; no dtype depends on them.
_COPIES = {"_to_copy", "_unsafe_view", "clone", "contiguous", "detach", "lift_fresh"}
_ALLOCATIONS = {"set_", "empty_like", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Row:
    """One operation in one module.

    Args:
        module: path of the module whose forward called it, "" for the model itself.
        op: name in ATen, without overload; of attention and batch normalisation the name that all backends share.
        inputs: dtypes of the floating inputs as they were before autocast cast them, each once.
        compute: dtype that it runs in, that is the widest among its inputs after the casts and its output.
        output: dtype of its first output.
        count: how often it ran in a row, with the same dtypes.
        casts: how many of its inputs were cast to another dtype for it.
        saved_bytes: bytes of its outputs, and of inputs cast for it, that are kept for backward.
    """

    module: str
    op: str
    inputs: tuple[torch.dtype, ...]
    compute: torch.dtype
    output: torch.dtype
    count: int = 1
    casts: int = 0
    saved_bytes: int = 0

    @property
    def dtypes(self) -> tuple[str, str, tuple[torch.dtype, ...], torch.dtype, torch.dtype]:
        """What two runs of one model have in common, however often it ran."""
        return self.module, self.op, self.inputs, self.compute, self.output


@dataclass(frozen=True)
class Totals:
    """Sums over a forward pass.

    Args:
        casts: casts between floating dtypes.
        cast_bytes: bytes that these read and write.
        casts_back: casts whose input requires a gradient: backward casts that gradient back.
        saved_bytes: bytes kept for backward. Parameters and buffers are not counted, inputs are.
    """

    casts: int
    cast_bytes: int
    casts_back: int
    saved_bytes: int


@dataclass
class _Step:
    """A row being recorded. A cast is one too, until an operation takes its result."""

    row: Row
    is_cast: bool = False
    taken_by: "_Step | None" = None
    casts: int = 0
    saved: int = 0


@dataclass
class _Sums:
    casts: int = 0
    cast_bytes: int = 0
    casts_back: int = 0


@dataclass
class _Life:
    """What is known of a storage: the step that made it, casts into it, its dtype before them, bytes if it is saved."""

    made_by: _Step | None = None
    casts: list[_Step] = field(default_factory=list)
    before_cast: torch.dtype | None = None
    saved: int = 0


class Recorder(TorchDispatchMode):
    """Context that records the operations of a model, on real or fake tensors alike.

    What torch.compile made runs as eager code in the context, so that its operations are seen, and compiled again
    behind it.

    Args:
        model: modules whose forward passes give rows their path. Hooks are on it while the context is entered.

    Sync: none. Keeps no tensor alive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._left = ExitStack()
        self._path: list[str] = []
        self._steps: list[_Step] = []
        self._lives: dict[StorageWeakRef, _Life] = {}
        self._sums = _Sums()
        self._grad = True
        tensors = [*model.parameters(), *model.buffers()]
        self._state = {key for tensor in tensors if (key := _storage(tensor))}

    @property
    def module(self) -> str:
        """Path of the module that is running, or that raised."""
        return self._path[-1] if self._path else ""

    def __enter__(self) -> "Recorder":
        with ExitStack() as entered:
            entered.enter_context(without_compiled_code())
            for hook in self._hooks():
                entered.callback(hook.remove)
            self._left = entered.pop_all()
        self._grad = torch.is_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._left.close()

    def _hooks(self) -> Iterator[RemovableHandle]:
        for name, module in self._model.named_modules():
            yield module.register_forward_pre_hook(partial(self._push, name), prepend=True)
            yield module.register_forward_hook(partial(self._pop, name))

    def _push(self, name: str, module: nn.Module, args: Any) -> None:
        self._path.append(name)

    def _pop(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        while self._path and self._path.pop() != name:
            pass  # a module inside raised, and the error was caught

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in METADATA_OPS:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _name(func)
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            if _is_floating(source) and _is_floating(target) and source.dtype is not target.dtype:
                self._cast(source, target)
                return
        if name in _COPIES and _is_floating(args[0]):
            life = self._life(args[0])
            self._lives.setdefault(_storage(result), _Life(life.made_by, life.casts, life.before_cast))
        if func.is_view or name in _COPIES or name in _ALLOCATIONS:
            return
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if outputs and any(map(_is_floating, inputs)):
            self._operation(ONE_NAME.get(name, name), inputs, outputs)

    def _cast(self, source: Tensor, target: Tensor) -> None:
        self._sums.casts += 1
        self._sums.cast_bytes += _nbytes(source) + _nbytes(target)
        # Autocast casts a weight with a graph even where gradients are off.
        self._sums.casts_back += self._grad and torch.is_grad_enabled() and source.requires_grad
        step = _Step(Row(self.module, "cast", (source.dtype,), target.dtype, target.dtype), is_cast=True)
        self._steps.append(step)
        before, after = self._life(source), self._life(target)
        before.made_by = before.made_by or step
        after.made_by = after.made_by or step
        after.before_cast = before.before_cast or source.dtype
        after.casts.append(step)

    def _operation(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        step = _Step(Row(self.module, name, (), torch.float32, torch.float32))
        before = []
        for tensor in inputs:
            life = self._life(tensor)
            if _is_floating(tensor):
                before.append(life.before_cast or tensor.dtype)
            for cast in life.casts:
                cast.taken_by = step
            step.casts += len(life.casts)
            life.casts.clear()
            life.made_by = life.made_by or step  # for an input of the model, its first user
        for tensor in outputs:
            life = self._life(tensor)
            life.made_by = life.made_by or step
            life.before_cast = None
        step.row = replace(
            step.row,
            inputs=tuple(dict.fromkeys(before)),
            compute=_compute_dtype([*inputs, outputs[0]]),
            output=outputs[0].dtype,
        )
        self._steps.append(step)

    def _life(self, tensor: Tensor) -> _Life:
        return self._lives.setdefault(_storage(tensor), _Life())

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves; for `torch.autograd.graph.saved_tensors_hooks`."""
        key = _storage(tensor)
        if key is not None and key not in self._state:
            self._lives.setdefault(key, _Life()).saved = tensor.untyped_storage().nbytes()
        return tensor

    def rows(self) -> tuple[Row, ...]:
        """Return what was recorded, in order; equal rows that follow one another in one module are one."""
        for step in self._steps:
            step.saved = 0
        for life in self._lives.values():
            if life.made_by is not None:
                (life.made_by.taken_by or life.made_by).saved += life.saved
        rows = [
            replace(step.row, casts=step.casts or int(step.is_cast), saved_bytes=step.saved)
            for step in self._steps
            if step.taken_by is None
        ]
        return tuple(_merged(list(group)) for _, group in groupby(rows, lambda row: row.dtypes))

    def totals(self) -> Totals:
        """Return the sums over what was recorded."""
        sums = self._sums
        saved = sum(life.saved for life in self._lives.values())
        return Totals(sums.casts, sums.cast_bytes, sums.casts_back, saved)


def _merged(rows: list[Row]) -> Row:
    return replace(
        rows[0],
        count=sum(row.count for row in rows),
        casts=sum(row.casts for row in rows),
        saved_bytes=sum(row.saved_bytes for row in rows),
    )


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None


def _compute_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the widest dtype; a number that is wrapped in a tensor does not widen others, as in torch's promotion."""
    floating = [tensor for tensor in tensors if _is_floating(tensor)]
    wide = [tensor for tensor in floating if tensor.dim()] or floating
    return reduce(torch.promote_types, (tensor.dtype for tensor in wide))
