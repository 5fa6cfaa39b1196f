"""Which operations run in which module and in which dtypes: a dispatch mode sees them, below autograd and autocast."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch.compile import without_compiled_code
from .._torch.tensors.fast_paths import autocast_of_parts, note_autocast_of_fast_paths
from .._torch.tensors.modes import TorchDispatchMode
from .._torch.tensors.operators import METADATA_OPS
from .._torch.tensors.tensors import storage_of
from .._torch.tensors.tree import tensors_in
from .._undo import Undo

# Operations that have another name on each backend, and the name that is shown. The device chooses the backend, and the
# choice changes no dtype.
ONE_NAME = {
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"), "batch_norm"),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), "batch_norm"),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update"), "batch_norm"),
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
}
# Operations that are not shown. Whether they run depends on strides, which the kernels of one operation choose
# differently, and they change no dtype.
_COPIES = {"_to_copy", "_unsafe_view", "clone", "contiguous", "detach", "lift_fresh"}
_ALLOCATIONS = {"set_", "empty_like", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class ExplanationRow:
    """One operation in one module.

    Args:
        module: path of the module whose forward called it, "" for the model itself.
        op: its name in ATen, without overload. Attention and batch normalisation have one name for all backends.
        inputs: the dtypes of the floating inputs before autocast cast them, each once.
        compute: the dtype that it runs in: the widest one among its inputs after the casts and its output. Of inputs
            that are subclasses with tensors inside, as in float8, it is that of these.
        output: the dtype of its first output.
        count: how many times in succession it ran with these dtypes.
        casts: how many of its inputs were cast to another dtype for it.
        saved_bytes: how many bytes of its outputs, and of inputs cast for it, are kept for backward.
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
        """A key that is equal for rows which differ in count, casts and saved bytes only."""
        return self.module, self.op, self.inputs, self.compute, self.output


@dataclass(frozen=True)
class Totals:
    """Sums over a forward pass. `Explanation` explains them."""

    casts: int  # between floating dtypes
    cast_bytes: int  # that they read and write
    casts_back: int  # how many of them have an input that requires a gradient
    saved_bytes: int


@dataclass
class _RecordedOp:
    """An operation or a cast that ran. A cast gets a row of its own only if no operation uses its result."""

    row: ExplanationRow
    is_cast: bool = False
    used_by: "_RecordedOp | None" = None  # for a cast: the operation that it was made for
    casts: int = 0
    saved: int = 0


@dataclass
class _StorageRecord:
    """What is known of the memory that one or more tensors lie in."""

    made_by: _RecordedOp | None = None
    casts: list[_RecordedOp] = field(default_factory=list)  # those that wrote it, until an operation has used it
    before_cast: torch.dtype | None = None
    saved: int = 0  # bytes, if autograd keeps it for backward


class OpRecorder(TorchDispatchMode):
    """Context that records the operations of a model, which has hooks meanwhile. The tensors may be real or fake.

    Compiled code runs as eager code in the context, so that its operations are seen. Afterwards it runs compiled again.
    Sync: none. Keeps no tensor alive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._model = model
        self._undo = ExitStack()
        self._path: list[str] = []
        self._ops: list[_RecordedOp] = []
        self._storages: dict[StorageWeakRef, _StorageRecord] = {}
        self._casts = self._cast_bytes = self._casts_back = 0
        self._grad = True
        tensors = [*model.parameters(), *model.buffers()]
        self._model_storages = {key for tensor in tensors if (key := _storage(tensor))}

    @property
    def module(self) -> str:
        """The path of the module that is running, or that raised an error."""
        return self._path[-1] if self._path else ""

    supports_higher_order_operators = True  # torch.cond and flex_attention are one operation each

    def __enter__(self) -> "OpRecorder":
        with ExitStack() as entered:
            entered.enter_context(without_compiled_code())
            note_autocast_of_fast_paths(entered.enter_context(Undo()))
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name), prepend=True)
                entered.callback(before.remove)
                entered.callback(module.register_forward_hook(partial(self._pop, name)).remove)
            self._undo = entered.pop_all()
        self._grad = torch.is_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._undo.close()

    def _pop(self, name: str, *_: Any) -> None:
        while self._path and self._path.pop() != name:
            pass  # a module inside raised an error, which was caught, so its hook did not run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with autocast_of_parts(func):
            result = func(*args, **kwargs)
        if func not in METADATA_OPS:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        higher_order = not hasattr(func, "overloadpacket")
        name = func.name() if higher_order else func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            if _is_floating(source) and _is_floating(target) and source.dtype is not target.dtype:
                self._casts += 1
                self._cast_bytes += source.nbytes + target.nbytes
                # Autocast records the cast of a weight in a graph even where gradients are off.
                self._casts_back += self._grad and torch.is_grad_enabled() and source.requires_grad
                row = ExplanationRow(self.module, "cast", (source.dtype,), target.dtype, target.dtype)
                cast = _RecordedOp(row, is_cast=True)
                self._ops.append(cast)
                before, after = self._storage_record(source), self._storage_record(target)
                before.made_by = before.made_by or cast
                after.made_by = after.made_by or cast
                after.before_cast = before.before_cast or source.dtype
                after.casts.append(cast)
                return
        if name in _COPIES and _is_floating(args[0]):
            copied = self._storage_record(args[0])
            copy = _StorageRecord(copied.made_by, copied.casts, copied.before_cast)
            self._storages.setdefault(_storage(result), copy)
        if name in _COPIES or name in _ALLOCATIONS or (not higher_order and func.is_view):
            return
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if outputs and any(map(_is_floating, inputs)):
            self._record_operation(ONE_NAME.get(name, name), inputs, outputs)

    def _record_operation(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        op = _RecordedOp(ExplanationRow(self.module, name, (), torch.float32, torch.float32))
        before = []
        for tensor in inputs:
            storage = self._storage_record(tensor)
            if _is_floating(tensor):
                before.append(storage.before_cast or tensor.dtype)
            for cast in storage.casts:
                cast.used_by = op
            op.casts += len(storage.casts)
            storage.casts.clear()
            storage.made_by = storage.made_by or op  # nothing made an input of the model, so its first user counts
        for tensor in outputs:
            storage = self._storage_record(tensor)
            storage.made_by = storage.made_by or op
            storage.before_cast = None
        # A tensor without dimensions does not widen others, as in torch's type promotion.
        floating = [tensor for tensor in (*inputs, outputs[0]) if _is_floating(tensor)]
        wide = [tensor for tensor in floating if tensor.dim()] or floating
        wrapped = [dtype for tensor in inputs if (dtype := _dtype_inside(tensor))]  # that of a float8 product
        op.row = replace(
            op.row,
            inputs=tuple(dict.fromkeys(before)),
            compute=wrapped[0] if wrapped else reduce(torch.promote_types, (tensor.dtype for tensor in wide)),
            output=outputs[0].dtype,
        )
        self._ops.append(op)

    def _storage_record(self, tensor: Tensor) -> _StorageRecord:
        return self._storages.setdefault(_storage(tensor), _StorageRecord())

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves. Pass this to `saved_tensors_hooks` as the first hook."""
        key = _storage(tensor)
        if key is not None and key not in self._model_storages:
            self._storages.setdefault(key, _StorageRecord()).saved = tensor.untyped_storage().nbytes()
        return tensor

    def rows(self) -> tuple[ExplanationRow, ...]:
        """Return the operations in the order in which they ran. Equal ones in succession are one row."""
        for op in self._ops:
            op.saved = 0
        for storage in self._storages.values():
            if storage.made_by is not None:
                (storage.made_by.used_by or storage.made_by).saved += storage.saved
        shown = (op for op in self._ops if op.used_by is None)
        rows = [replace(op.row, casts=op.casts or int(op.is_cast), saved_bytes=op.saved) for op in shown]
        return tuple(merged(list(group)) for _, group in groupby(rows, lambda row: row.dtypes))

    def totals(self) -> Totals:
        """Return the sums over what was recorded."""
        saved = sum(storage.saved for storage in self._storages.values())
        return Totals(self._casts, self._cast_bytes, self._casts_back, saved)


def merged(rows: Sequence[ExplanationRow]) -> ExplanationRow:
    """Return the first row with the counts, casts and saved bytes of all of them."""
    return replace(
        rows[0],
        count=sum(row.count for row in rows),
        casts=sum(row.casts for row in rows),
        saved_bytes=sum(row.saved_bytes for row in rows),
    )


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _dtype_inside(tensor: Any) -> torch.dtype | None:
    """Return the dtype of the first tensor in a subclass that has tensors in it, None for another tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    inner: Tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return inner.dtype


def _storage(tensor: Tensor) -> Any:
    storage = storage_of(tensor)
    return None if storage is None else StorageWeakRef(storage)
