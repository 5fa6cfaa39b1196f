"""torch.compile: what was compiled, how to keep it from compiling, and how to make it forget."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._undo import Undo
from .guard import private
from .modules import module_tables

private(nn.Module, "_compiled_call_impl")  # what `module.compile()` puts on the module, None before


def never_compile_by_itself(function: Callable[..., Any]) -> None:
    """Keep torch.compile from starting at this function or below it. Compiled code that calls it is traced through it.

    Where compiled code falls back to Python, dynamo compiles the first frame that is not torch's own. Within a function
    mode that frame would be the mode's, for every operation.
    """
    dynamo = private(torch._C._dynamo, "eval_frame")
    skip = private(dynamo, "_FrameAction").SKIP
    strategy = private(dynamo, "_FrameExecStrategy")(skip, skip)
    private(dynamo, "set_code_exec_strategy")(function.__code__, strategy)


@contextmanager
def noticing_compiled_code() -> Iterator[Callable[[], bool]]:
    """Context that yields a function. It returns whether any thread has called compiled code in the context so far."""
    dynamo: Any = importlib.import_module("torch._dynamo.eval_frame")  # takes a second; so would the first optimizer
    called = []
    enter = private(dynamo, "_maybe_set_eval_frame")

    def noticed(callback: Any) -> Any:
        if callable(callback):  # otherwise the call keeps something from being compiled
            called.append(True)
        return enter(callback)

    with Undo() as undo:
        undo.note(setattr, dynamo, "_maybe_set_eval_frame", enter)
        dynamo._maybe_set_eval_frame = noticed
        yield lambda: bool(called)


def _nothing_was_compiled() -> bool:
    return "torch._dynamo" not in sys.modules  # the import takes a second, so who needs none makes none


def fail_on_recompile(undo: Undo) -> None:
    """Have torch.compile raise an error instead of compiling, which no capture may contain, until that is undone."""
    if _nothing_was_compiled():
        return
    dynamo = private(torch, "_dynamo").eval_frame
    before = private(dynamo, "_stance")
    if before.stance != "force_eager":  # or nothing compiles
        undo.note(private(dynamo, "_set_stance"), before)
        torch.compiler.set_stance("fail_on_recompile")


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Context in which compiled modules and functions run as eager code, on every thread.

    Under a dispatch mode that asks for no exception, dynamo gives up every frame that it meets, for good
    (torch/_dynamo/convert_frame.py). In this context it meets none, so compiled code stays compiled afterwards.
    """
    if _nothing_was_compiled():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def forget_compiled_code() -> None:
    """Empty what torch.compile keeps in memory: compiled code, by module and by source. Files stay on the disk."""
    if _nothing_was_compiled():
        return
    torch.compiler.reset()
    inductor = sys.modules.get("torch._inductor.utils")
    if inductor is not None:
        private(inductor, "clear_caches")()


def cudagraphs_of_its_own(compiled: object) -> bool:
    """Return whether torch.compile was asked to capture CUDA graphs itself (mode="reduce-overhead", "max-autotune")."""
    parts = [compiled]
    if isinstance(compiled, nn.Module):
        parts += [part for module in compiled.modules() for part in (module, vars(module).get("_compiled_call_impl"))]
    configs = (part.get_compiler_config() for part in parts if hasattr(part, "get_compiler_config"))
    return any(config.get("triton.cudagraphs", False) for config in configs if config)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(...)` returned this module. The hooks of modules inside it do not run."""
    # Checkpoints have "_orig_mod" in the names of parameters, so torch cannot rename this child.
    return "get_compiler_config" in vars(module) and "_orig_mod" in module_tables(module)[2]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. The module's hooks then run in compiled code, if at all."""
    return vars(module).get("_compiled_call_impl") is not None
