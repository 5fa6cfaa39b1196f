"""The C++ `Reducer` of a `DistributedDataParallel` model, which averages gradients: making it anew, and its clocks."""

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ..._undo import Undo
from ..autograd.autograd import current_node
from ..autograd.gradient_nodes import node_notes
from ..guard import private

Buckets = Sequence[Sequence[nn.Parameter]]

_MARK = "ampkit: the Reducer"  # a key of the metadata of autograd nodes
_BUILT_IN = "BuiltinCommHookType."  # begins what the log has of a hook that is written in C++
_MEASURED = 10  # steps, in reducer.cpp
_NEVER = 2**31 - 1  # the largest int of C++
_buckets: "WeakKeyDictionary[DistributedDataParallel, Buckets]" = WeakKeyDictionary()


def peculiarity(ddp: DistributedDataParallel) -> str:
    """Return what no graph can hold of how this model averages gradients, by argument or function; "" if nothing."""
    params = private(ddp, "_module_parameters")
    if private(ddp, "_delay_all_reduce_params"):
        return "delay_all_reduce_named_params"
    if ddp.mixed_precision is not None:
        return "mixed_precision"
    if private(ddp, "_use_python_reducer"):
        return "python_reducer"
    if private(ddp, "_join_config").enable:
        return "join"
    # See `_setup_in_backward_optimizers` in torch/nn/parallel/distributed.py.
    return "optimizer_in_backward" if any(hasattr(param, "_in_backward_optimizers") for param in params) else ""


def is_bitmap_copy(source: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether a copy from host memory is that of a bitmap in which a Reducer notes which parameters are used.

    A Reducer that looks for unused parameters copies it to the device behind the last gradient, from pinned memory
    (`Reducer::all_reduce_local_used_map` in torch/csrc/distributed/c10d/reducer.cpp). What a capture takes of that
    memory is not used for anything else as long as the graph lives (ATen/core/CachingHostAllocator.h). The lengths are
    those of the bitmaps: the numbers of parameters of the models.
    """
    accumulates = hasattr(current_node(), "variable")
    return accumulates and source.dtype is torch.int32 and source.dim() == 1 and source.numel() in lengths


def note_used(undo: Undo, ddp: DistributedDataParallel) -> Callable[[], list[str]]:
    """Note which parameters of a model get a gradient on this rank, until the end of a context.

    Returns a function for the names of those that have got none; it returns [] if no parameter has got one.
    """
    params, _ = private(ddp, "_build_params_for_reducer")()
    names = private(ddp, "_build_debug_param_to_name_mapping")(params)
    used: set[int] = set()

    def note(index: int, gradients: tuple[Any, ...]) -> None:
        if gradients[0] is not None:  # the Reducer takes no parameter as used whose gradient is undefined
            used.add(index)

    for i, param in enumerate(params):
        undo.note(get_gradient_edge(param).node.register_prehook(functools.partial(note, i)).remove)
    return lambda: [names[i] for i in range(len(params)) if used and i not in used]


def communication_hook(ddp: DistributedDataParallel) -> tuple[str, Any, Any]:
    """Return name, function and state of the hook that exchanges gradients. The name is "" if there is no hook.

    The function is None if the hook is written in C++, or if the model does not know how it was registered.
    """
    name = str(private(ddp, "_get_ddp_logging_data")().get("comm_hook", ""))
    hook, state = (private(ddp, "_comm_hooks") or [(None, None)])[-1]
    return name, hook, state


def is_registrable(ddp: DistributedDataParallel) -> bool:
    """Return whether the communication hook of a model, if any, could be registered again."""
    name, hook, _ = communication_hook(ddp)
    known = name == hook.__qualname__ if hook is not None else name.startswith(_BUILT_IN) or not name
    return known and len(private(ddp, "_comm_hooks")) < 2


def manages_all(ddp: DistributedDataParallel) -> bool:
    """Return whether the Reducer averages the gradients of just those parameters that require one now."""
    params, _ = private(ddp, "_build_params_for_reducer")()
    managed = private(ddp, "_get_ddp_logging_data")().get("num_parameter_tensors")
    return bool(managed == len(params))


def is_rebuilt(ddp: DistributedDataParallel) -> bool:
    """Return whether `rebuild` has made the Reducer of this model."""
    return all(node_notes(param).get(_MARK) == "new" for param in private(ddp, "_build_params_for_reducer")()[0])


def rebuild(ddp: DistributedDataParallel) -> list[str]:
    """Make the Reducer of a model anew, so that it belongs to the current stream. To be called by all ranks at a time.

    A Reducer keeps the nodes alive that accumulate gradients, and each node runs on the stream that was current when it
    was made (InputMetadata in torch/csrc/autograd/input_metadata.cpp). A new Reducer gets new nodes, if nothing else
    has kept the old ones. Its settings and hooks are those of the old one. Its buckets are laid out in the next two
    steps, as those of a new model.

    `DistributedDataParallel.__setstate__` does the same for a model that was pickled. Returns the names of parameters
    whose nodes something else has kept, so that they still belong to the old stream. Sync: waits for the device.
    """
    params, sparse = private(ddp, "_build_params_for_reducer")()
    names = private(ddp, "_build_debug_param_to_name_mapping")(params)
    name, hook, state = communication_hook(ddp)
    for param in params:
        node_notes(param)[_MARK] = "old"
    _buckets.pop(ddp, None)
    del ddp.reducer, ddp.logger  # a node ends with the last reference to it
    if any(node_notes(param) for param in params):
        gc.collect()  # a loss in a cycle may have kept them
    kept = [names[i] for i, param in enumerate(params) if node_notes(param).get(_MARK) == "old"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the old buckets, which have the size of all gradients
    private(ddp, "_ddp_init_helper")(params, sparse, names, ddp.static_graph)
    logger: Any = ddp.logger
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        logger._set_static_graph()
    if name:  # `_comm_hooks` has it already
        logger._set_comm_hook_name(name)
    if name and hook is not None:
        private(torch.distributed, "_register_comm_hook")(ddp.reducer, state, hook)
    elif name:
        kind = private(torch.distributed, "BuiltinCommHookType").__members__[name.removeprefix(_BUILT_IN)]
        private(torch.distributed, "_register_builtin_comm_hook")(ddp.reducer, kind)
    for param in params:
        node_notes(param)[_MARK] = "new"
    return kept


def lay_out(ddp: DistributedDataParallel) -> None:
    """Have the Reducer lay out its buckets now, if the next forward would, and note them for `buckets_of`.

    To be called eagerly, by all ranks at a time: it waits for the others if there is something to lay out. torch lays
    out the buckets of a Reducer once, behind its first backward, and tells what is in them with zeros as gradients.
    """
    if peculiarity(ddp):
        return
    if torch.is_grad_enabled() and private(ddp.reducer, "_rebuild_buckets")():
        ddp._has_rebuilt_buckets = True
    if ddp._has_rebuilt_buckets and ddp not in _buckets:
        made = private(ddp.reducer, "_get_zeros_like_grad_buckets")()
        _buckets[ddp] = [bucket.parameters() for bucket in made]


def buckets_of(ddp: DistributedDataParallel) -> Buckets | None:
    """Return the parameters of each bucket of a Reducer, in the order in which they lie there.

    None if they are not known yet, or if the Reducer does not what it does by default.
    """
    hooked, _, _ = communication_hook(ddp)
    return None if hooked or ddp.static_graph or ddp.find_unused_parameters else _buckets.get(ddp)


def gradient_calls(ddp: DistributedDataParallel) -> dict[nn.Parameter, Callable[[], None]]:
    """Return, by parameter, what tells the Reducer within a backward that the parameter has its gradient.

    Autograd calls it where a parameter is in the graph. DDP's own `mixed_precision` calls it as this does.
    """
    call = private(ddp.reducer, "_autograd_hook")
    params: list[nn.Parameter] = private(ddp, "_build_params_for_reducer")()[0]
    return {param: functools.partial(call, i) for i, param in enumerate(params)}


def bucket_bytes(ddp: DistributedDataParallel, share: float) -> int:
    """Return `bucket_bytes_cap` as torch.compile needs it to split a module where a bucket of gradients is complete.

    It counts the bytes of the parameters that it sees, a `share` of those that the buckets have, and asserts that the
    cap is not below that of the first bucket (torch/_dynamo/backends/distributed.py).
    """
    first: int = private(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES")
    return max(first, int(private(ddp, "bucket_bytes_cap") * share))


def is_idle(ddp: DistributedDataParallel) -> bool:
    """Return whether the last backward has averaged all gradients. After one that has raised, no forward can run."""
    try:
        private(ddp.reducer, "_check_reducer_finalized")()
    except RuntimeError:  # "Expected to have finished reduction in the prior iteration"
        return False
    return True


def reset(ddp: DistributedDataParallel) -> None:
    """Let the next forward run though a backward has raised. To be called by all ranks at a time.

    The Reducer lays out new buckets in the two steps to come, so that graphs must not be replayed any more.
    """
    _buckets.pop(ddp, None)
    private(ddp.reducer, "_reset_state")()
    ddp._has_rebuilt_buckets = False


def stop_clocks(ddp: DistributedDataParallel) -> None:
    """Have the Reducer measure no more times, which it does with CUDA events that it waits for. To be called eagerly.

    It measures in the first ten steps, and in every hundredth later (`should_collect_runtime_stats` in
    torch/csrc/distributed/c10d/reducer.cpp). A capture must not wait. So its count of steps is moved on, which the
    Reducer uses for nothing else, but to know the first step of a static graph.
    """
    reducer = ddp.reducer
    private(reducer, "_set_ddp_runtime_logging_sample_rate")(_NEVER)
    if not ddp.static_graph or private(ddp, "_static_graph_delay_allreduce_enqueued"):
        for _ in range(_MEASURED + 1):
            reducer.prepare_for_forward()
