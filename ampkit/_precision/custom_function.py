"""Autocast in a custom `torch.autograd.Function`: backward runs under what forward ran under, by attributes of ctx."""

import copy
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from .._arguments import check_callable, check_device_type, wrong
from .._errors import AmpkitError

_Method = TypeVar("_Method", bound=Callable[..., Any])

# The attributes of ctx that torch.amp.custom_fwd writes and torch.amp.custom_bwd reads (torch/amp/autocast_mode.py).
# Kept, so that either decorator of torch pairs with the other one of ampkit.
_DTYPE = "_dtype"
_ENABLED = "_fwd_used_autocast"
# Ours: the device type that forward settled on; the dtypes of its outputs before `cast_outputs`; whether forward saved
# an output that `cast_outputs` then replaced; and, on such an output until setup_context has read it, its old dtype.
_DEVICE = "_ampkit_device_type"
_BEFORE = "_ampkit_output_dtypes"
_SEVERED = "_ampkit_saved_uncast_output"
_WAS = "_ampkit_dtype_before_cast"

_DICTS = (dict, OrderedDict)  # rebuilt in a way that torch.compile can trace, as it cannot copy.copy


@overload
def custom_fwd(
    fwd: _Method,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    cast_outputs: torch.dtype | None = None,
) -> _Method: ...


@overload
def custom_fwd(
    fwd: None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    cast_outputs: torch.dtype | None = None,
) -> Callable[[_Method], _Method]: ...


def custom_fwd(
    fwd: Any = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    cast_outputs: torch.dtype | None = None,
) -> Any:
    """Decorate `forward`, and `setup_context` where there is one, of a `torch.autograd.Function` for autocast.

    Accepts every call that `torch.amp.custom_fwd` accepts. Outside autocast it changes nothing.

    A Function whose `forward` has no ctx decorates `setup_context` as well, with the same arguments: what backward
    needs is recorded there, and its `inputs` are cast like those of `forward`.

    Args:
        fwd: the method, or None to get a decorator.
        device_type: whose autocast counts: "cuda", "cpu", ... None takes that of the tensors among the inputs, where
            an accelerator outweighs the CPU.
        cast_inputs: floating dtype. Under autocast the inputs are cast to it and `forward` runs with autocast off. Cast
            are the floating tensors on that device except float64, also in tuples, lists, sets, dicts, their
            subclasses, namedtuples and dataclass instances. Second derivatives reach the inputs through the cast.
        cast_outputs: floating dtype. Under autocast the floating outputs except float64 are cast to it. `backward` then
            gets its gradients in the dtypes that `forward` itself returned.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: an argument that is not what it should be. When called: no device type can be inferred, or
            `cast_outputs` meets an output that `forward` changed in place.
    """
    _check_device_type("custom_fwd", device_type)
    _check_dtype("cast_inputs", cast_inputs)
    _check_dtype("cast_outputs", cast_outputs)
    if fwd is None:
        return functools.partial(
            custom_fwd, device_type=device_type, cast_inputs=cast_inputs, cast_outputs=cast_outputs
        )
    method = _callable("custom_fwd", "fwd", fwd)
    if getattr(method, "__name__", "") == "setup_context":
        return _decorate_setup_context(method, device_type, cast_inputs)
    return _decorate_forward(method, device_type, cast_inputs, cast_outputs)


@overload
def custom_bwd(bwd: _Method, *, device_type: str | None = None) -> _Method: ...


@overload
def custom_bwd(bwd: None = None, *, device_type: str | None = None) -> Callable[[_Method], _Method]: ...


def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """Decorate `backward` of a `torch.autograd.Function`: it runs under the autocast that forward ran under.

    Accepts every call that `torch.amp.custom_bwd` accepts, and pairs with `torch.amp.custom_fwd` too.

    Args:
        bwd: the method, or None to get a decorator.
        device_type: whose autocast to set: "cuda", "cpu", ... None takes the one that forward ran with.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: an argument that is not what it should be.
        AmpkitError: when called: forward (or setup_context) is not decorated; or the backward of the backward is asked
            for, and forward saved an output that `cast_outputs` replaced: a derivative would be missing.
    """
    _check_device_type("custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    method = _callable("custom_bwd", "bwd", bwd)

    @functools.wraps(method)
    def backward(ctx: Any, *grads: Any, **kwargs: Any) -> Any:
        _check_recorded(ctx, method)
        kind = device_type or _device_type_of_forward(ctx, method, grads)
        grads = _in_dtypes_of_forward(grads, getattr(ctx, _BEFORE, None))
        if kind is None:
            return method(ctx, *grads, **kwargs)
        with torch.autocast(kind, enabled=getattr(ctx, _ENABLED), dtype=getattr(ctx, _DTYPE)):
            return method(ctx, *grads, **kwargs)

    return backward


def _decorate_forward(
    method: Callable[..., Any],
    device_type: str | None,
    cast_inputs: torch.dtype | None,
    cast_outputs: torch.dtype | None,
) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A Function with setup_context has no ctx here: its first argument is the user's and is left alone. Stand-ins
        # for ctx, with which some libraries call forward by hand, have save_for_backward as well.
        own = 1 if args and hasattr(args[0], "save_for_backward") else 0
        ctx, inputs = args[:own], args[own:]
        kind = device_type or _inferred("custom_fwd", method, (inputs, kwargs))
        enabled = kind is not None and torch.is_autocast_enabled(kind)
        if own:
            _record(args[0], kind, enabled and cast_inputs is None)
        if kind is None or not enabled:
            return method(*args, **kwargs)
        if cast_inputs is None:
            outputs = method(*args, **kwargs)
        else:
            with torch.autocast(kind, enabled=False):
                outputs = method(*ctx, *_cast(inputs, kind, cast_inputs), **_cast(kwargs, kind, cast_inputs))
        if cast_outputs is None:
            return outputs
        return _cast_outputs(args[0] if own else None, outputs, kind, cast_outputs)

    return forward


def _decorate_setup_context(
    method: Callable[..., Any], device_type: str | None, cast_inputs: torch.dtype | None
) -> Callable[..., Any]:
    @functools.wraps(method)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        # Called right after forward, on the same thread and under the same autocast: nothing has to be handed over
        # but the dtypes before `cast_outputs`, which the outputs carry.
        kind = device_type or _inferred("custom_fwd", method, inputs)
        enabled = kind is not None and torch.is_autocast_enabled(kind)
        _record(ctx, kind, enabled and cast_inputs is None)
        before = [_take_dtype(value) for value in (output if isinstance(output, tuple) else (output,))]
        if any(dtype is not None for dtype in before):
            setattr(ctx, _BEFORE, before)
        if kind is None or not enabled or cast_inputs is None:
            return method(ctx, inputs, output)
        with torch.autocast(kind, enabled=False):
            return method(ctx, _cast(inputs, kind, cast_inputs), output)

    return setup_context


def _record(ctx: Any, kind: str | None, enabled: bool) -> None:
    setattr(ctx, _DEVICE, kind)
    setattr(ctx, _ENABLED, enabled)
    setattr(ctx, _DTYPE, None if kind is None else torch.get_autocast_dtype(kind))


def _check_recorded(ctx: Any, method: Callable[..., Any]) -> None:
    name = getattr(method, "__qualname__", repr(method))
    if not hasattr(ctx, _ENABLED):
        raise AmpkitError(
            f"custom_bwd on {name}: nothing says which autocast forward ran under. Decorate forward with "
            "ampkit.custom_fwd, and setup_context too if there is one, with the same arguments."
        )
    if hasattr(ctx, _SEVERED) and torch.is_grad_enabled():
        raise AmpkitError(
            f"custom_bwd on {name}: forward saved an output that cast_outputs replaced by its cast, so the second "
            "derivative would lack a term. Leave cast_outputs out and cast what apply() returns, or use setup_context."
        )


def _device_type_of_forward(ctx: Any, method: Callable[..., Any], grads: tuple[Any, ...]) -> str | None:
    if hasattr(ctx, _DEVICE):
        return cast("str | None", getattr(ctx, _DEVICE))
    return _inferred("custom_bwd", method, grads)  # forward has torch's decorator, which does not record it


def _in_dtypes_of_forward(grads: tuple[Any, ...], before: list[torch.dtype | None] | None) -> tuple[Any, ...]:
    """Cast each gradient as autograd does behind a cast: to the dtype that was cast from."""
    if before is None:
        return grads
    assert len(grads) == len(before)
    return tuple(
        grad if grad is None or dtype is None else grad.to(dtype) for grad, dtype in zip(grads, before, strict=True)
    )


def _cast_outputs(ctx: Any, outputs: Any, kind: str, dtype: torch.dtype) -> Any:
    old = list(outputs) if isinstance(outputs, tuple) else [outputs]
    new = [_cast(value, kind, dtype) for value in old]
    replaced = [isinstance(value, Tensor) and value is not after for value, after in zip(old, new, strict=True)]
    before = [value.dtype if gone else None for value, gone in zip(old, replaced, strict=True)]
    if ctx is None:
        for after, was in zip(new, before, strict=True):
            if was is not None:
                setattr(after, _WAS, was)  # on our own new tensor; setup_context takes it off again
    elif any(replaced):
        setattr(ctx, _BEFORE, before)
        _move_marks(ctx, old, new)
    return _rebuilt(outputs, new) if isinstance(outputs, tuple) else new[0]


def _take_dtype(output: Any) -> torch.dtype | None:
    was = getattr(output, _WAS, None) if isinstance(output, Tensor) else None
    if was is None:
        return None
    if torch.compiler.is_compiling():
        setattr(output, _WAS, None)  # torch.compile cannot delete an attribute of a tensor
    else:
        delattr(output, _WAS)
    return cast(torch.dtype, was)


def _move_marks(ctx: Any, old: list[Any], new: list[Any]) -> None:
    """Let what forward told ctx about its outputs hold for the casts that are returned in their place."""

    def instead(tensor: Any) -> Any:
        return next((after for before, after in zip(old, new, strict=True) if before is tensor), tensor)

    dirty, marked, saved = (
        getattr(ctx, name, None) or () for name in ("dirty_tensors", "non_differentiable", "to_save")
    )
    if any(instead(tensor) is not tensor for tensor in dirty):
        raise ValueError("custom_fwd(cast_outputs=...): forward marks an output dirty; a cast is not in place.")
    if any(instead(tensor) is not tensor for tensor in marked):
        ctx.mark_non_differentiable(*map(instead, marked))
    if any(instead(tensor) is not tensor for tensor in saved):
        setattr(ctx, _SEVERED, True)


def _cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    """Return the tree with its eligible tensors cast. What holds no such tensor is returned as it is, not copied."""
    if isinstance(value, Tensor):
        eligible = value.is_floating_point() and value.device.type == kind and value.dtype is not torch.float64
        return _cast_tensor(value, dtype) if eligible else value
    if isinstance(value, Iterator):
        return (_cast(part, kind, dtype) for part in value)
    parts = _parts(value)
    if not parts:
        return value
    after = [_cast(part, kind, dtype) for part in parts]
    if all(new is old for new, old in zip(after, parts, strict=True)):
        return value
    return _rebuilt(value, after)


def _cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    if torch.compiler.is_compiling() or not tensor.requires_grad:
        return tensor.to(dtype)
    with torch.enable_grad():  # forward runs without; a saved cast that is a constant makes second derivatives wrong
        return tensor.to(dtype)


def _parts(value: Any) -> list[Any]:
    """Return what a container holds, in an order that `_rebuilt` knows; nothing for any other value."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if type(value) not in _DICTS and _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value.values()) if isinstance(value, Mapping) else []


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, (tuple, list, set, frozenset)):
        make = getattr(value, "_make", type(value))  # that of a namedtuple
        return make(parts)
    if type(value) in _DICTS:
        # By its name: from torch 2.14 on, torch.compile cannot trace a call of the OrderedDict that `type` returns.
        make = OrderedDict if isinstance(value, OrderedDict) else dict
        return make(zip(value, parts, strict=True))
    if _is_dataclass(value):
        return _rebuilt_dataclass(value, parts)
    if isinstance(value, MutableMapping):
        new = copy.copy(value)  # keeps the factory of a defaultdict, and the attributes of a subclass
        for key, part in zip(value, parts, strict=True):
            new[key] = part
        return new
    return dict(zip(value, parts, strict=True))


def _rebuilt_dataclass(value: Any, parts: list[Any]) -> Any:
    fields = dataclasses.fields(value)
    new = dataclasses.replace(
        value, **{field.name: part for field, part in zip(fields, parts, strict=True) if field.init}
    )
    for field, part in zip(fields, parts, strict=True):
        if not field.init:
            object.__setattr__(new, field.name, part)  # also where the class is frozen
    return new


def _is_dataclass(value: Any) -> bool:
    # The attribute first: torch.compile can ask any instance for it, but not every class, as is_dataclass does.
    known = hasattr(value, "__dataclass_fields__") and dataclasses.is_dataclass(value)
    return known and not isinstance(value, type)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from _tensors(part)


def _device_type(tree: Any) -> str | None:
    """Return the device type of the tensors, None where autocast knows none of them (meta tensors).

    Raises:
        LookupError: there is no tensor, or tensors of two accelerators.
    """
    found = {tensor.device.type for tensor in _tensors(tree)}
    if not found:
        raise LookupError("there is no tensor")
    kinds = found - {"meta"}
    if len(kinds) > 1:
        kinds.discard("cpu")  # a scalar or an index beside the data
    if len(kinds) > 1:
        raise LookupError(f"there are tensors on {' and '.join(sorted(kinds))}")
    return kinds.pop() if kinds else None


def _inferred(decorator: str, method: Callable[..., Any], tree: Any) -> str | None:
    try:
        return _device_type(tree)
    except LookupError as found:
        raise ValueError(
            f"{decorator} on {getattr(method, '__qualname__', method)}: {found}, so the device type is unknown. "
            f"Say whose autocast counts: {decorator}(device_type='cuda')."
        ) from None


def _callable(decorator: str, argument: str, method: Any) -> Callable[..., Any]:
    method = method.__func__ if isinstance(method, staticmethod) else method
    expected = f"a method to decorate; options are keywords, as in {decorator}(device_type='cuda')"
    check_callable(decorator, argument, method, expected)
    return cast(Callable[..., Any], method)


def _check_device_type(decorator: str, device_type: object) -> None:
    if device_type is not None:
        check_device_type(decorator, device_type, ", or None for that of the tensors")


def _check_dtype(argument: str, dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong("custom_fwd", argument, dtype, "a floating torch.dtype, or None")
