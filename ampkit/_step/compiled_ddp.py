"""The modules inside of `DistributedDataParallel`, compiled each by itself, as DDP's own code cannot be."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.compile import Compiler, GraphBreak, call_compiled, uncompiled_call, untraced
from .._undo import Undo, replace


class ModulesInside:
    """Compiled code of the modules inside of DDP, for one layout of the batch.

    DDP prepares its Reducer in forward and exchanges buffers, which no compiler follows. So a compiled loss ends its
    graph there, and the module inside is compiled by itself. While DDP's forward runs, torch splits what it compiles at
    the ends of gradient buckets (`DDPOptimizer`), so that they are exchanged while the rest of the backward runs.

    Args:
        wrappers: the `DistributedDataParallel` modules.
        compiler: compiles.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel], compiler: Compiler) -> None:
        self._forwards = [(ddp, untraced(ddp.forward, _WHY)) for ddp in wrappers]
        self._calls: list[tuple[nn.Module, Callable[..., Any]]] = [
            (ddp.module, functools.partial(compiler.compiled(uncompiled_call), ddp.module)) for ddp in wrappers
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context for a compiled loss, in which calls of these modules run compiled code."""
        with Undo() as undo:
            for ddp, forward in self._forwards:
                replace(undo, ddp, "forward", forward)
            for module, call in self._calls:
                call_compiled(undo, module, call)
            yield


def is_of_wrapper(found: GraphBreak) -> bool:
    """Return whether a graph ends at the call of a DDP module, or at the end of a bucket, as it should."""
    return _WHY in found.text or any(file.endswith(_SPLITS) for file, _ in found.places)


_SPLITS = "torch/_dynamo/backends/distributed.py"
_WHY = "ampkit compiles the module inside of DistributedDataParallel by itself"
