"""Torch's fast paths of inference under autocast on a CPU, in code that a dispatch mode watches."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..._undo import Undo, replace
from ..guard import private

_FAST_PATHS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_FAST_PATH_OPS = frozenset(private(torch.ops.aten, name).default for name in _FAST_PATHS)
_exclude_key = private(torch._C, "_dispatch_tls_set_dispatch_key_excluded")
_CPU_AUTOCAST = private(torch._C, "DispatchKey").AutocastCPU


class _NotedAutocast(threading.local):
    """Whether autocast was on for the CPU where this thread called the fast path that runs."""

    on = False


_noted_autocast = _NotedAutocast()


class _Nothing(AbstractContextManager[None]):
    """As `nullcontext`. But whoever watches calls of functions (`seeing_calls`) need not judge those of Python's."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


_NOTHING = _Nothing()


def note_autocast_of_fast_paths(undo: Undo) -> None:
    """Have `autocast_of_parts` know until `undo` whether autocast was on. Within a dispatch mode it is always off."""
    for name in _FAST_PATHS:
        replace(undo, torch, name, _noting_autocast(private(torch, name)))


def _noting_autocast(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return called(*args, **kwargs)
        with Undo() as undo:
            undo.note(setattr, _noted_autocast, "on", _noted_autocast.on)
            _noted_autocast.on = torch.is_autocast_enabled("cpu")
            return called(*args, **kwargs)

    return noting


def autocast_of_parts(op: Any) -> AbstractContextManager[None]:
    """Context in which a dispatch mode calls an operation, so that autocast casts what its parts compute with.

    Within a dispatch mode torch's autocast is off: it has cast the arguments before. But the fast paths of inference
    are operations whose arguments it does not cast. It casts those of the products that they are made of. On CUDA torch
    takes no fast path under autocast. See `note_autocast_of_fast_paths`.
    """
    return _cpu_autocast() if op in _FAST_PATH_OPS and _noted_autocast.on else _NOTHING


@contextmanager
def _cpu_autocast() -> Iterator[None]:
    with Undo() as undo:
        undo.note(_exclude_key, _CPU_AUTOCAST, True)
        _exclude_key(_CPU_AUTOCAST, False)
        yield
