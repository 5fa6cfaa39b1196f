"""The order in which autograd adds up gradients of gradients: that in which their operations ran, in every thread."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..._undo import Undo
from ..tensors.modes import let_autograd_use_threads, uses_autograd_threads
from .autograd import ENGINE_ENTRIES

_lock = threading.Lock()
_contexts: dict[object, int] = {}  # the contexts that are open, and their threads
_before: list[tuple[Any, str, Any]] = []  # what is replaced as long as one of them is open


def make_graphs_here(undo: Undo, *, all_backwards: bool = False) -> None:
    """Until the end of a context, run backward passes of this thread in it if they have `create_graph=True`.

    Autograd runs the newest node first, by numbers that each thread counts for itself. On CUDA a backward pass runs in
    a thread of autograd's, so the nodes that it makes have numbers of that thread. How these compare with the numbers
    of the forward pass depends on all that the process has done before, and so does the order in which a later backward
    adds up gradients, and with it their last bits (csrc/autograd/engine.h, CompareNodeTaskTime). A graph would repeat
    the order of its capture. In one thread the numbers grow as operations run.

    Args:
        undo: of the context.
        all_backwards: whether to run all backward passes of this thread in it, for calls that are compared with others.
            cuDNN's benchmark keeps its choices for each thread (ATen/native/cudnn/Conv_v8.cpp), and one thread may have
            chosen other kernels than another one.
    """
    if all_backwards:
        undo.note(let_autograd_use_threads, uses_autograd_threads())
        let_autograd_use_threads(False)
    token = object()
    undo.note(_close, token)
    with _lock:
        _contexts[token] = threading.get_ident()
        if not _before:
            for owner, name in ENGINE_ENTRIES:
                engine = getattr(owner, name)
                _before.append((owner, name, engine))
                # One that somebody has put around torch's may hold a step, which the cache would keep alive.
                is_torchs = getattr(engine, "__closure__", engine) is None
                make = _in_this_thread if is_torchs else _in_this_thread.__wrapped__
                setattr(owner, name, make(engine))


def _close(token: object) -> None:
    with _lock:
        _contexts.pop(token, None)
        while not _contexts and _before:
            owner, name, engine = _before[-1]
            setattr(owner, name, engine)
            _before.pop()


@functools.lru_cache(8)  # made anew, it would take 10 us of each eager step
def _in_this_thread(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's engine, which runs a backward pass in the calling thread if that is to make its graph here."""

    @functools.wraps(engine)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        if not create_graph or threading.get_ident() not in _contexts.copy().values():
            return engine(outputs, *args, **kwargs)
        with Undo() as undo:
            undo.note(let_autograd_use_threads, uses_autograd_threads())
            let_autograd_use_threads(False)
            return engine(outputs, *args, **kwargs)

    return run
