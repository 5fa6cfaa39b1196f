"""torch.compile: what is compiled, keeping it from compiling, and forgetting what it compiled."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._undo import Undo
from .guard import private


def never_compile_by_itself(function: Callable[..., Any]) -> None:
    """Keep torch.compile from starting at this function or below. It still traces through it from compiled code.

    Where a compiled function falls back to Python, dynamo compiles the first frame below that is not torch's own: with
    a function mode around, that would be the mode, at each operation.
    """
    dynamo = private(torch._C._dynamo, "eval_frame")
    skip = private(dynamo, "_FrameAction").SKIP
    strategy = private(dynamo, "_FrameExecStrategy")(skip, skip)
    private(dynamo, "set_code_exec_strategy")(function.__code__, strategy)


@contextmanager
def noticing_compiled_code() -> Iterator[Callable[[], bool]]:
    """Context that yields what tells whether code of torch.compile was called in it so far, by any thread."""
    dynamo: Any = importlib.import_module("torch._dynamo.eval_frame")  # takes a second; so would the first optimizer
    called = []
    enter = private(dynamo, "_maybe_set_eval_frame")

    def noticed(callback: Any) -> Any:
        if callable(callback):  # not where something is kept from being compiled
            called.append(True)
        return enter(callback)

    with Undo() as undo:
        undo.note(setattr, dynamo, "_maybe_set_eval_frame", enter)
        dynamo._maybe_set_eval_frame = noticed
        yield lambda: bool(called)


def fail_on_recompile(undo: Undo) -> None:
    """Have torch.compile raise where it would compile, until that is undone: a capture must not hold that."""
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        return
    dynamo = private(torch, "_dynamo").eval_frame
    before = private(dynamo, "_stance")
    if before.stance != "force_eager":  # or nothing compiles
        undo.note(private(dynamo, "_set_stance"), before)
        torch.compiler.set_stance("fail_on_recompile")


def cudagraphs_of_its_own(compiled: object) -> bool:
    """Return whether torch.compile was asked to capture CUDA graphs itself (mode="reduce-overhead", "max-autotune")."""
    parts = [compiled]
    if isinstance(compiled, nn.Module):
        parts += [part for module in compiled.modules() for part in (module, vars(module).get("_compiled_call_impl"))]
    configs = (part.get_compiler_config() for part in parts if hasattr(part, "get_compiler_config"))
    return any(config.get("triton.cudagraphs", False) for config in configs if config)


def forget_compiled_code() -> None:
    """Empty what torch.compile keeps in memory: what it compiled, by module and by source. Files are left alone."""
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        return
    torch.compiler.reset()
    inductor = sys.modules.get("torch._inductor.utils")
    if inductor is not None:
        private(inductor, "clear_caches")()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile(module) returned: the hooks of those below it do not run."""
    return "get_compiler_config" in vars(module) and "_orig_mod" in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called: its hooks run in compiled code, if at all."""
    return vars(module).get("_compiled_call_impl") is not None


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Context in which what torch.compile was asked to compile runs as it was written, on every thread.

    Under a dispatch mode that asks for no exception, dynamo gives up each frame that it meets, and its code never runs
    compiled again (torch/_dynamo/convert_frame.py); here it meets none. A cache that was warm before is warm behind it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
