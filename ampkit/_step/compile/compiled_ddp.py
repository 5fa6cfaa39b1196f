"""The modules inside of `DistributedDataParallel`, compiled each by itself, as DDP's own code cannot be."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..._torch.compile import Compiler, GraphBreak, call_compiled, uncompiled_call, untraced
from ..._undo import Undo, replace


def compiled_around(
    function: Callable[..., Any], wrappers: Sequence[DistributedDataParallel], compiler: Compiler
) -> Callable[..., Any]:
    """Return the function compiled, for one layout of its arguments, and with it the modules inside of these wrappers.

    DDP prepares its Reducer in forward and exchanges buffers, which no compiler follows. So the function's graph ends
    where it calls DDP, and the module inside is compiled by itself. While DDP's forward runs, torch splits what it
    compiles at the ends of gradient buckets (`DDPOptimizer`), and these are exchanged while the backward goes on.
    """
    compiled = compiler.compiled(function)
    if not wrappers:
        return compiled
    forwards = [(ddp, untraced(ddp.forward, _WHY)) for ddp in wrappers]
    calls = [(ddp.module, functools.partial(compiler.compiled(uncompiled_call), ddp.module)) for ddp in wrappers]

    def call(*args: Any, **kwargs: Any) -> Any:
        with Undo() as undo:
            for ddp, forward in forwards:
                replace(undo, ddp, "forward", forward)
            for module, inside in calls:
                call_compiled(undo, module, inside)
            return compiled(*args, **kwargs)

    return call


def is_of_wrapper(found: GraphBreak) -> bool:
    """Return whether a graph ends at the call of a DDP module, or at the end of a bucket, as it should."""
    return _WHY in found.text or _SPLIT in found.text


_SPLIT = "DDPOptimizer intentional graph-break"  # in torch's own words
_WHY = "ampkit compiles the module inside of DistributedDataParallel by itself"
