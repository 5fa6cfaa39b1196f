"""Autocast in a custom `torch.autograd.Function`: attributes of ctx carry its state from forward to backward."""

import copy
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from .._arguments import check_callable, check_device_type, wrong
from .._errors import AmpkitError

_Method = TypeVar("_Method", bound=Callable[..., Any])

# torch.amp.custom_fwd writes these attributes of ctx and torch.amp.custom_bwd reads them (torch/amp/autocast_mode.py).
# ampkit uses the same ones, so that a decorator of torch and one of ampkit work together.
_AUTOCAST_DTYPE = "_dtype"
_AUTOCAST_ENABLED = "_fwd_used_autocast"
# ampkit's own attributes of ctx.
_DEVICE_TYPE = "_ampkit_device_type"  # whose autocast forward ran under
_OUTPUT_DTYPES = "_ampkit_output_dtypes"  # of the outputs before `cast_outputs`, None for those that it left alone
_SAVED_UNCAST_OUTPUT = "_ampkit_saved_uncast_output"  # set if forward saved an output that `cast_outputs` replaced
# An attribute of an output that was cast, until setup_context has read it.
_DTYPE_BEFORE_CAST = "_ampkit_dtype_before_cast"

_EXPECTED = "a method to decorate; options are keywords, as in {0}(device_type='cuda')"
_OR_NONE = ", or None for that of the tensors"
_PLAIN_DICTS = (dict, OrderedDict)  # torch.compile can trace how these are rebuilt; it cannot trace copy.copy


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

    If the Function has a `setup_context`, decorate that as well, with the same arguments. It records what backward
    needs, because such a `forward` has no ctx. Its `inputs` are cast in the same way as those of `forward`.

    Args:
        fwd: the method, or None to get a decorator.
        device_type: "cuda", "cpu", ...: the device type whose autocast state counts. None takes that of the tensors
            among the inputs. An accelerator wins over the CPU.
        cast_inputs: floating dtype. Under autocast the inputs are cast to it, and `forward` runs with autocast off. All
            floating tensors on that device are cast, except float64, also those in tuples, lists, sets, dicts, their
            subclasses, namedtuples and dataclass instances. Second derivatives reach the inputs through the cast.
        cast_outputs: floating dtype. Under autocast the floating outputs, except float64, are cast to it. `backward`
            then gets its gradients in the dtypes that `forward` itself returned.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: an argument is wrong. In a call: the device type cannot be inferred, or `cast_outputs` would cast an
            output that `forward` changed in place.
    """
    if device_type is not None:
        check_device_type("custom_fwd", device_type, _OR_NONE)
    for argument, dtype in (("cast_inputs", cast_inputs), ("cast_outputs", cast_outputs)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise wrong("custom_fwd", argument, dtype, "a floating torch.dtype, or None")
    if fwd is None:
        return functools.partial(
            custom_fwd, device_type=device_type, cast_inputs=cast_inputs, cast_outputs=cast_outputs
        )
    method = fwd.__func__ if isinstance(fwd, staticmethod) else fwd
    check_callable("custom_fwd", "fwd", method, _EXPECTED.format("custom_fwd"))
    if getattr(method, "__name__", "") == "setup_context":
        return _decorate_setup_context(method, device_type, cast_inputs)
    return _decorate_forward(method, device_type, cast_inputs, cast_outputs)


@overload
def custom_bwd(bwd: _Method, *, device_type: str | None = None) -> _Method: ...


@overload
def custom_bwd(bwd: None = None, *, device_type: str | None = None) -> Callable[[_Method], _Method]: ...


def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """Decorate `backward` of a `torch.autograd.Function`: it runs under the autocast state that forward ran under.

    Accepts every call that `torch.amp.custom_bwd` accepts. `forward` may have the decorator of `torch.amp` instead.

    Args:
        bwd: the method, or None to get a decorator.
        device_type: "cuda", "cpu", ...: the device type whose autocast is set. None takes the one of forward.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: an argument is wrong.
        AmpkitError: in a call: forward or setup_context is not decorated. Or a second derivative is asked for, and
            forward saved an output that `cast_outputs` replaced, so that a term of it would be missing.
    """
    if device_type is not None:
        check_device_type("custom_bwd", device_type, _OR_NONE)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    method = bwd.__func__ if isinstance(bwd, staticmethod) else bwd
    check_callable("custom_bwd", "bwd", method, _EXPECTED.format("custom_bwd"))

    @functools.wraps(method)
    def backward(ctx: Any, *grads: Any, **kwargs: Any) -> Any:
        name = getattr(method, "__qualname__", repr(method))
        if not hasattr(ctx, _AUTOCAST_ENABLED):
            raise AmpkitError(
                f"custom_bwd on {name}: forward did not record under which autocast it ran. Decorate forward with "
                "ampkit.custom_fwd, and setup_context too if there is one, with the same arguments."
            )
        if hasattr(ctx, _SAVED_UNCAST_OUTPUT) and torch.is_grad_enabled():
            raise AmpkitError(
                f"custom_bwd on {name}: forward saved an output that cast_outputs replaced by its cast, so the second "
                "derivative would lack a term. Leave cast_outputs out and cast what apply() returns, or use "
                "setup_context."
            )
        if device_type is not None:
            device: str | None = device_type
        elif hasattr(ctx, _DEVICE_TYPE):
            device = getattr(ctx, _DEVICE_TYPE)
        else:  # forward has torch's decorator, which does not record it
            device = _inferred("custom_bwd", method, grads)
        before = getattr(ctx, _OUTPUT_DTYPES, None)
        if before is not None:  # autograd casts each gradient to the dtype of its output: `cast_outputs` changed that
            grads = tuple(
                grad if grad is None or dtype is None else grad.to(dtype)
                for grad, dtype in zip(grads, before, strict=True)
            )
        if device is None:
            return method(ctx, *grads, **kwargs)
        with torch.autocast(device, enabled=getattr(ctx, _AUTOCAST_ENABLED), dtype=getattr(ctx, _AUTOCAST_DTYPE)):
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
        # Without setup_context the first argument is ctx. What some libraries pass in its place, when they call forward
        # by hand, has save_for_backward as well.
        has_ctx = 1 if args and hasattr(args[0], "save_for_backward") else 0
        ctx, inputs = args[:has_ctx], args[has_ctx:]
        device = device_type or _inferred("custom_fwd", method, (inputs, kwargs))
        enabled = _recorded(args[0] if has_ctx else None, device, cast_inputs)
        if device is None or not enabled:
            return method(*args, **kwargs)
        if cast_inputs is None:
            outputs = method(*args, **kwargs)
        else:
            with torch.autocast(device, enabled=False):
                inputs = _cast_inputs(method, inputs, device, cast_inputs)
                kwargs = _cast_inputs(method, kwargs, device, cast_inputs)
                outputs = method(*ctx, *inputs, **kwargs)
        if cast_outputs is None:
            return outputs
        return _cast_outputs(args[0] if has_ctx else None, outputs, device, cast_outputs)

    return forward


def _decorate_setup_context(
    method: Callable[..., Any], device_type: str | None, cast_inputs: torch.dtype | None
) -> Callable[..., Any]:
    @functools.wraps(method)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        # autograd calls this right after forward, on the same thread and under the same autocast. So forward has to
        # hand over nothing but the dtypes before `cast_outputs`, and its outputs carry these.
        device = device_type or _inferred("custom_fwd", method, inputs)
        enabled = _recorded(ctx, device, cast_inputs)
        before: list[torch.dtype | None] = []
        for value in output if isinstance(output, tuple) else (output,):
            before.append(getattr(value, _DTYPE_BEFORE_CAST, None) if isinstance(value, Tensor) else None)
            if before[-1] is not None and torch.compiler.is_compiling():
                setattr(value, _DTYPE_BEFORE_CAST, None)  # torch.compile cannot delete an attribute of a tensor
            elif before[-1] is not None:
                delattr(value, _DTYPE_BEFORE_CAST)
        if any(dtype is not None for dtype in before):
            setattr(ctx, _OUTPUT_DTYPES, before)
        if device is None or not enabled or cast_inputs is None:
            return method(ctx, inputs, output)
        with torch.autocast(device, enabled=False):
            return method(ctx, _cast_inputs(method, inputs, device, cast_inputs), output)

    return setup_context


def _recorded(ctx: Any, device: str | None, cast_inputs: torch.dtype | None) -> bool:
    """Return whether autocast is on. Put on ctx, if there is one, under which autocast state backward has to run."""
    enabled = device is not None and torch.is_autocast_enabled(device)
    if ctx is not None:
        setattr(ctx, _DEVICE_TYPE, device)
        setattr(ctx, _AUTOCAST_ENABLED, enabled and cast_inputs is None)
        setattr(ctx, _AUTOCAST_DTYPE, None if device is None else torch.get_autocast_dtype(device))
    return enabled


def _cast_outputs(ctx: Any, outputs: Any, device: str, dtype: torch.dtype) -> Any:
    old = list(outputs) if isinstance(outputs, tuple) else [outputs]
    new = [_cast(value, device, dtype) for value in old]
    replaced = [isinstance(value, Tensor) and value is not after for value, after in zip(old, new, strict=True)]
    before = [value.dtype if gone else None for value, gone in zip(old, replaced, strict=True)]
    if ctx is None:
        for after, dtype_before in zip(new, before, strict=True):
            if dtype_before is not None:
                setattr(after, _DTYPE_BEFORE_CAST, dtype_before)  # setup_context reads and removes it
    elif any(replaced):
        setattr(ctx, _OUTPUT_DTYPES, before)
        _transfer_marks(ctx, old, new)
    return _rebuilt(outputs, new) if isinstance(outputs, tuple) else new[0]


def _transfer_marks(ctx: Any, old: list[Any], new: list[Any]) -> None:
    """Repeat for the casts that are returned what forward told ctx about the outputs before the cast."""

    def instead(tensor: Any) -> Any:
        return next((after for before, after in zip(old, new, strict=True) if before is tensor), tensor)

    dirty, marked, saved = (
        getattr(ctx, name, None) or () for name in ("dirty_tensors", "non_differentiable", "to_save")
    )
    if any(instead(tensor) is not tensor for tensor in dirty):
        raise ValueError(
            "custom_fwd(cast_outputs=...): forward marks an output dirty, which it changed in place, and a cast would "
            "return another tensor. Leave cast_outputs out, or return a new tensor."
        )
    if any(instead(tensor) is not tensor for tensor in marked):
        ctx.mark_non_differentiable(*map(instead, marked))
    if any(instead(tensor) is not tensor for tensor in saved):
        setattr(ctx, _SAVED_UNCAST_OUTPUT, True)


def _cast_inputs(method: Callable[..., Any], inputs: Any, device: str, dtype: torch.dtype) -> Any:
    if torch.compiler.is_compiling():  # dynamo cannot trace the other branch
        return _cast(inputs, device, dtype)
    try:
        return _cast(inputs, device, dtype)
    except RecursionError:
        name = getattr(method, "__qualname__", method)
        raise ValueError(f"custom_fwd on {name}: an input contains itself, so it cannot be cast.") from None


def _cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Return the value with the floating tensors in it cast, except float64 and those on another type of device.

    A container in which nothing is cast is returned itself, not a copy.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.device.type != device or value.dtype in (torch.float64, dtype):
            return value
        if torch.compiler.is_compiling() or not value.requires_grad:
            return value.to(dtype)
        # autograd runs forward without gradients. A cast that has none would be a constant to a second derivative.
        with torch.enable_grad():
            return value.to(dtype)
    if isinstance(value, Iterator):
        return (_cast(part, device, dtype) for part in value)
    parts = _parts(value)
    if not parts:
        return value
    after = [_cast(part, device, dtype) for part in parts]
    if all(new is old for new, old in zip(after, parts, strict=True)):
        return value
    return _rebuilt(value, after)


def _parts(value: Any) -> list[Any]:
    """Return what a container holds, in the order that `_rebuilt` takes it. Return nothing for any other value."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if type(value) not in _PLAIN_DICTS and _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value.values()) if isinstance(value, Mapping) else []


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a container like `value` that holds other parts."""
    if isinstance(value, (tuple, list, set, frozenset)):
        make = getattr(value, "_make", type(value))  # a namedtuple has _make
        return make(parts)
    if type(value) in _PLAIN_DICTS:
        # OrderedDict is named because torch.compile, from torch 2.14 on, cannot trace a call of what `type` returns.
        make = OrderedDict if isinstance(value, OrderedDict) else dict
        return make(zip(value, parts, strict=True))
    if _is_dataclass(value):
        fields = list(zip(dataclasses.fields(value), parts, strict=True))
        new = dataclasses.replace(value, **{field.name: part for field, part in fields if field.init})
        for field, part in fields:
            if not field.init:
                object.__setattr__(new, field.name, part)  # works on a frozen class, too
        return new
    if isinstance(value, MutableMapping):
        new = copy.copy(value)  # keeps the factory of a defaultdict, and the attributes of a subclass
        for key, part in zip(value, parts, strict=True):
            new[key] = part
        return new
    return dict(zip(value, parts, strict=True))


def _is_dataclass(value: Any) -> bool:
    # is_dataclass asks the class, which torch.compile cannot do for every class. It can ask any instance.
    known = hasattr(value, "__dataclass_fields__") and dataclasses.is_dataclass(value)
    return known and not isinstance(value, type)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from _tensors(part)


def _inferred(decorator: str, method: Callable[..., Any], tree: Any) -> str | None:
    """Return the device type of the tensors, None if all are meta tensors, which have no autocast, or raise."""
    problem = ""
    found: set[str] = set()
    if torch.compiler.is_compiling():  # dynamo cannot trace the other branch
        found = {tensor.device.type for tensor in _tensors(tree)}
    else:
        try:
            found = {tensor.device.type for tensor in _tensors(tree)}
        except RecursionError:
            problem = "an input contains itself"
    if not found:
        problem = problem or "there is no tensor"
    found.discard("meta")
    if len(found) > 1:
        found.discard("cpu")  # a scalar or an index beside the data
    if len(found) > 1:
        problem = f"there are tensors on {' and '.join(sorted(found))}"
    if problem:
        raise ValueError(
            f"{decorator} on {getattr(method, '__qualname__', method)}: {problem}, so the device type is unknown. "
            f"Name the one whose autocast counts: {decorator}(device_type='cuda')."
        )
    return found.pop() if found else None
