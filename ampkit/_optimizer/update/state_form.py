"""Weights and optimizer state in bfloat16: which tensors are, how they are rounded, and a step that keeps them so.

The arithmetic of a step is float32. torch's fused kernels take tensors of one dtype only, so a step copies a few
million elements at a time to float32, lets the kernel step these, and rounds them back. As the step of a fused
optimizer it takes `grad_scale` and `found_inf` from the optimizer, so that the kernel unscales, clips and skips.
Compiled code (`update_code`) does the same with `widened` and `narrowed`, in one kernel with the arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.utils.hooks import RemovableHandle

from ..._torch.optimizers import note_step
from ..._torch.tensors.tensors import foreach_copy_, sharded_class
from ..step_kind import is_fused, parameters, runs_beside_step, torch_class

COMPENSATION = "compensation"  # what rounding has taken off a weight: its key in the optimizer's state
_LARGEST = torch.finfo(torch.bfloat16).max
_MOST_ELEMENTS = 2**22  # that are in float32 at once, for which a step takes 100 to 200 MB
_ALIGNED = 8  # elements: kernels read 16 bytes at once where a tensor begins at a multiple of that


class StateForm(NamedTuple):
    """How an optimizer keeps what it steps, where that is not as torch does.

    Attributes:
        moments: whether the moments of float32 weights are bfloat16. Those of bfloat16 weights always are, as torch's.
        rounding: how the new value of a bfloat16 weight is rounded: "stochastic" or "kahan". None if weights are
            float32. With "stochastic" moments are rounded in this way too, otherwise to nearest.
    """

    moments: bool = False
    rounding: str | None = None

    def names(self, group: dict[str, Any], param: Tensor) -> list[str]:
        """Return the keys of the tensors of a weight's shape that a step keeps of it, the compensation last."""
        if "betas" not in group:  # SGD
            names = ["momentum_buffer"] if group["momentum"] != 0 else []
        else:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        return [*names, COMPENSATION] if self.compensates(param) else names

    def compensates(self, param: Tensor) -> bool:
        """Return whether there is a compensation for this weight."""
        return self.rounding == "kahan" and param.dtype is torch.bfloat16

    def dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a weight's moments."""
        return torch.bfloat16 if self.moments else param.dtype

    def why_not(self, optimizer: Optimizer) -> str:
        """Return why this optimizer cannot step in this form and what to write instead, "" if it can."""
        name = type(optimizer).__name__
        if torch_class(optimizer) not in (Adam, AdamW, SGD) or not is_fused(optimizer):
            return f"{name} is not Adam, AdamW or SGD of torch.optim with fused=True, whose kernels it takes"
        if hidden := runs_beside_step(optimizer):
            return f"{name} has {hidden}, which it would not call. Call after the step what they do"
        for group in optimizer.param_groups:
            if group.get("momentum") and group["dampening"] != 0:
                return "SGD has dampening, with which a first step is another one. Write dampening=0"
            if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
                return f"{name} has betas that are tensors. Write them as numbers"
        for param in parameters(optimizer):
            if param.dtype is not torch.float32 and (self.rounding is None or param.dtype is not torch.bfloat16):
                low = "float32, or bfloat16 with Policy(params='bfloat16', rounding='stochastic')"
                return f"{name} has a parameter of {param.dtype}. Use {low}"
            if not isinstance(param, sharded_class()) and param.stride() != _layout(param):
                return f"{name} has a parameter of shape {tuple(param.shape)} with gaps in memory. Use .contiguous()"
        return ""

    def never_falls(self, optimizer: Optimizer) -> float | None:
        """Return a beta with which rounding to nearest keeps an average of squares from falling; None if all are fine.

        One step takes `1 - beta` of it away if the gradient is 0. Two numbers of bfloat16 are 2**-7 to 2**-8 of
        themselves apart, and rounding to nearest undoes a change of less than half of that.
        """
        if self.rounding == "stochastic":
            return None
        betas = [group["betas"][1] for group in optimizer.param_groups if "betas" in group]
        return next((beta for beta in betas if 1 - beta < 2**-8), None)


_forms: "WeakKeyDictionary[Optimizer, tuple[StateForm, RemovableHandle]]" = WeakKeyDictionary()


def set_state_form(optimizer: Optimizer, form: StateForm | None) -> None:
    """Have an optimizer step in a form from now on, which is possible by `StateForm.why_not`; None: as torch's does.

    State that is there is cast, now and when `load_state_dict` has loaded other state; a compensation is dropped where
    the form has none.
    """
    before = _forms.pop(optimizer, None)
    if before is not None:
        before[1].remove()
    if form is not None:
        _forms[optimizer] = form, optimizer.register_load_state_dict_post_hook(_cast_state)
    if form is not None or before is not None:
        _cast_state(optimizer)


def state_form(optimizer: Optimizer) -> StateForm | None:
    """Return the form that an optimizer steps in, None if its step is torch's."""
    found = _forms.get(optimizer)
    return None if found is None else found[0]


def _cast_state(optimizer: Optimizer) -> None:
    form = state_form(optimizer) or StateForm()
    for group in optimizer.param_groups:
        for param in group["params"]:
            state: dict[str, Any] = optimizer.state.get(param, {})
            for name in form.names(group, param):
                value = state.get(name)
                if isinstance(value, Tensor) and value.dtype is not form.dtype(param):
                    state[name] = value.to(form.dtype(param))
            if not form.compensates(param):
                state.pop(COMPENSATION, None)


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return what steps an optimizer: its own `step`, or that of its form. Sync: none in the latter."""
    form = state_form(optimizer)
    return optimizer.step if form is None else partial(_step, optimizer, form)


def widened(low: list[Tensor], *, compensated: bool) -> list[Tensor]:
    """Return float32 copies of a weight and its moments, or of moments alone. A compensation, the last, is added."""
    wide = [tensor.float() for tensor in low]
    return [wide[0] + wide[-1], *wide[1:-1]] if compensated else wide


def narrowed(wide: Sequence[Tensor], *, compensated: bool, stochastic: bool) -> list[Tensor]:
    """Return bfloat16 copies of what `widened` has returned, after the step. The last one is the new compensation."""
    if not compensated:
        return [round_stochastically(tensor) if stochastic else tensor.bfloat16() for tensor in wide]
    # By integers: Inductor leaves out a cast to bfloat16 and back, so that nothing would be left to compensate (2.11).
    odd = (wide[0].view(torch.int32) >> 16) & 1
    rounded = _carried(wide[0], odd + (2**15 - 1))
    return [rounded.bfloat16(), *(tensor.bfloat16() for tensor in wide[1:]), (wide[0] - rounded).bfloat16()]


def round_stochastically(value: Tensor) -> Tensor:
    """Return float32 values as bfloat16: one of the two neighbours, each the likelier the nearer it is.

    The expected value is the value. Random bits come from the default generator of the device. Values beyond the
    largest number of bfloat16, inf and nan are rounded as by `Tensor.bfloat16`. Sync: none.
    """
    bits = torch.randint(0, 2**16, value.shape, dtype=torch.int32, device=value.device)
    return _carried(value, bits).bfloat16()


def _carried(value: Tensor, lower: Tensor) -> Tensor:
    """Return float32 values with the lower 16 bits 0, after integers of 16 bits were added to these.

    The upper bits are the neighbour in bfloat16 that is nearer to 0, and a carry makes it the next one. Values beyond
    the largest number of bfloat16, inf and nan stay as they are. Aliasing: writes to `lower`.
    """
    carried = lower.add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(value.abs() <= _LARGEST, carried, value)


class _Scaling(NamedTuple):
    grad_scale: Tensor | None  # what gradients are divided by
    found_inf: Tensor | None  # 1.0 if the step is to be skipped


class _Piece(NamedTuple):
    """A parameter with its gradient, or a part of them of a few million elements."""

    param: Tensor
    grad: Tensor
    kept: list[Tensor]  # in the order of `StateForm.names`
    steps: Tensor | None  # how many there were; None for SGD


def _step(optimizer: Optimizer, form: StateForm) -> None:
    """Step as the fused kernel of the optimizer does, which takes `grad_scale` and `found_inf` from its attributes."""
    if problem := form.why_not(optimizer):  # options may have changed
        raise ValueError(f"graphed_step(optimizer): {problem}.")
    note_step(optimizer)
    scaling = _Scaling(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
    with torch.no_grad():
        for group in optimizer.param_groups:
            for chunk in _chunks(_pieces(optimizer, form, group)):
                _step_chunk(form, group, chunk, scaling)


def _pieces(optimizer: Optimizer, form: StateForm, group: dict[str, Any]) -> Iterator[_Piece]:
    for param in sorted(group["params"], key=lambda param: param.dtype is torch.bfloat16):
        grad = param.grad
        if grad is None:
            continue
        if isinstance(param, sharded_class()):
            raise NotImplementedError(
                "graphed_step(moments=, Policy(rounding=)): parameters are split in another way than by fully_shard "
                "over one group of ranks. Split them by fully_shard alone, or leave these arguments out."
            )
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        state = optimizer.state[param]
        names = form.names(group, param)
        for name in names:
            value = state.get(name)
            if value is None or value.dtype is not form.dtype(param) or value.stride() != param.stride():
                fresh = state[name] = torch.zeros_like(param, dtype=form.dtype(param), requires_grad=False)
                if value is not None:
                    fresh.copy_(value)
        if "betas" in group and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        kept, count = [state[name] for name in names], state.get("step")
        together = [param.detach(), grad, *kept]
        if param.numel() <= _MOST_ELEMENTS or not param.is_contiguous():
            yield _Piece(together[0], grad, kept, count)
            continue
        parts = zip(*(tensor.view(-1).split(_MOST_ELEMENTS) for tensor in together), strict=True)
        counts = [None if count is None else count.clone() for _ in range(math.ceil(param.numel() / _MOST_ELEMENTS))]
        counts[-1] = count  # each part counts the step, but this is the one that counts
        for part_count, (part, part_grad, *part_kept) in zip(counts, parts, strict=True):
            yield _Piece(part, part_grad, part_kept, part_count)


def _chunks(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces in lists of few elements, and of one dtype each."""
    chunk: list[_Piece] = []
    size = 0
    for piece in pieces:
        size += piece.param.numel()
        if chunk and (size > _MOST_ELEMENTS or chunk[0].param.dtype is not piece.param.dtype):
            yield chunk
            chunk, size = [], piece.param.numel()
        chunk.append(piece)
    if chunk:
        yield chunk


def _step_chunk(form: StateForm, group: dict[str, Any], chunk: list[_Piece], scaling: _Scaling) -> None:
    params = [piece.param for piece in chunk]
    compensated = form.compensates(params[0])
    roles = [params, *map(list, zip(*(piece.kept for piece in chunk), strict=True))]
    low = [role for role in roles if role[0].dtype is torch.bfloat16]
    before = [_joined(role, params) for role in low]
    wide = widened(before, compensated=compensated)
    in_float32 = iter([_views(flat, params) for flat in wide])
    stepped = [role if role[0].dtype is torch.float32 else next(in_float32, []) for role in roles]
    grads = [piece.grad for piece in chunk]
    if grads[0].dtype is not torch.float32:
        grads = _views(_joined(grads, params).float(), params)
    counts = [piece.steps for piece in chunk if piece.steps is not None]
    _step_float32(group, stepped[0], grads, stepped[1 : len(stepped) - compensated], counts, scaling)
    if not low:  # parameters that a policy keeps in float32, with their moments
        return
    after = narrowed(wide, compensated=compensated, stochastic=form.rounding == "stochastic")
    if (found := scaling.found_inf) is not None:
        after = [torch.where(found > 0, old, new) for old, new in zip(before, after, strict=True)]
    foreach_copy_([t for role in low for t in role], [view for flat in after for view in _views(flat, params)])


def _step_float32(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[list[Tensor]],
    counts: list[Tensor],
    scaling: _Scaling,
) -> None:
    """Step by torch's own fused kernel."""
    shared: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
    shared |= {"foreach": False, "fused": True, **scaling._asdict()}
    if "betas" not in group:
        buffers: list[Any] = moments[0] if moments else [None] * len(params)
        sgd(params, grads, buffers, **{name: group[name] for name in ("momentum", "dampening", "nesterov")}, **shared)
        return
    averages, squares, *largest = moments
    beta1, beta2 = group["betas"]
    shared |= {name: group[name] for name in ("capturable", "decoupled_weight_decay", "amsgrad", "eps")}
    largest = largest or [[]]
    adam(params, grads, averages, squares, largest[0], counts, beta1=beta1, beta2=beta2, **shared)


def _layout(param: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor like this one without gaps."""
    return param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the parts of a tensor of shape (n,) that stand for tensors like these. Aliasing: the same memory."""
    parts = flat.split([_room(tensor) for tensor in like])
    return [part.as_strided(tensor.shape, tensor.stride()) for part, tensor in zip(parts, like, strict=True)]


def _joined(tensors: list[Tensor], like: list[Tensor]) -> Tensor:
    """Return a copy of tensors of one dtype as one of shape (n,), for `_views`."""
    size = sum(map(_room, like))
    flat = torch.empty(size, dtype=tensors[0].dtype, device=tensors[0].device)
    foreach_copy_(_views(flat, like), tensors)
    return flat


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() / _ALIGNED) * _ALIGNED
