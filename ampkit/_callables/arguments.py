"""The arguments of `make_graphed_callables`: callables and samples in the forms that torch takes; their checks."""

from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import check_at_least, check_callable, check_choice, check_flag, check_instance
from .._capture.engine.options import check_capturing
from .._capture.keys.inputs import flatten
from .._torch.tensors.modules import has_legacy_backward_hooks

LEGACY_HOOK = (
    "a hook of register_backward_hook reads the last operation of a module, which is inside the graph. Calls are "
    "eager. Use register_full_backward_hook."
)


def parse(callables: Any, sample_args: Any, sample_kwargs: Any) -> tuple[tuple[Any, ...], list[tuple[Any, Any]]]:
    """Return the callables, and the positional and keyword arguments of a sample for each of them."""
    if not isinstance(callables, tuple):
        callables, sample_args = (callables,), (sample_args,)
        sample_kwargs = None if sample_kwargs is None else (sample_kwargs,)
    if sample_kwargs is None:
        sample_kwargs = ({},) * len(callables)
    where = "make_graphed_callables"
    check_instance(where, "sample_args", sample_args, (tuple, list), "a tuple of arguments for each callable")
    check_instance(where, "sample_kwargs", sample_kwargs, (tuple, list), "a dict of arguments for each callable")
    if not len(callables) == len(sample_args) == len(sample_kwargs):
        raise ValueError(
            f"make_graphed_callables: {len(callables)} callables, but {len(sample_args)} sample_args and "
            f"{len(sample_kwargs)} sample_kwargs. Pass a tuple of arguments, and a dict if any, for each callable."
        )
    for function, args, named in zip(callables, sample_args, sample_kwargs, strict=True):
        check_callable(where, "callables", function, "a module, a function or a tuple of them")
        expected = "a tuple of arguments; for one argument write sample_args=(x,)"
        check_instance(where, "sample_args", args, (tuple, list), expected)
        check_instance(where, "sample_kwargs", named, dict, "a dict of keyword arguments")
        if isinstance(function, nn.Module) and has_legacy_backward_hooks(function):
            raise ValueError(f"make_graphed_callables: {LEGACY_HOOK}")
    return callables, [(tuple(args), dict(named)) for args, named in zip(sample_args, sample_kwargs, strict=True)]


def check_options(
    num_warmup_iters: object, allow_unused_input: object, graph: object, pool: object, capturing: object
) -> None:
    """Raise a `ValueError` unless these arguments of `make_graphed_callables` can work."""
    where = "make_graphed_callables"
    check_at_least(where, "num_warmup_iters", num_warmup_iters, 0, "the number of passes before a capture")
    check_flag(where, "allow_unused_input", allow_unused_input)
    check_choice(where, "graph", graph, ("auto", "emulate", "off"))
    check_capturing(where, capturing)
    expected = "a handle as torch.cuda.graph_pool_handle() returns it, or None"
    check_instance(where, "pool", pool, (tuple, type(None)), expected)


def device_of(function: Any, sample: Any) -> torch.device:
    """Return the CUDA device of the sample and parameters, or another device if none is on CUDA."""
    tensors = [leaf for leaf in flatten(*sample)[0] if isinstance(leaf, Tensor)]
    if isinstance(function, nn.Module):
        tensors += [*function.parameters(), *function.buffers()]
    devices = sorted({tensor.device for tensor in tensors}, key=lambda device: device.type != "cuda")
    return devices[0] if devices else torch.device("cpu")
