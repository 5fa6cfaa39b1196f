"""torch.compile: what was compiled, how to keep it from compiling, and how to make it forget."""

import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._undo import Undo, keep_warning_filters, replace
from .compiler_code import WRITTEN
from .device.kernel_timing import timed_back_to_back
from .guard import private
from .tensors.modules import module_tables

_WRAPPERS = tuple(os.path.join("torch", *file) for file in (("_utils.py",), ("_dynamo", "external_utils.py")))
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


@functools.cache
def _asking(question: str) -> CodeType:
    """Return the code of a function that asks `_ampkit_answer`, a global variable of torch.compiler, this question."""
    code = compile(f"def asking(): return _ampkit_answer({question!r})", torch.compiler.__file__, "exec")
    return next(each for each in code.co_consts if isinstance(each, CodeType))


# By which code asks whether it is being compiled. torch.compile answers by itself, by the identity of the function.
_QUESTIONS = ("is_compiling", "is_dynamo_compiling")
_asked = {name: (getattr(torch.compiler, name), getattr(torch.compiler, name).__code__) for name in _QUESTIONS}
# compiling_truth[question](): the true answer.
compiling_truth: dict[str, Callable[[], bool]] = {
    name: FunctionType(code, vars(torch.compiler)) for name, (_, code) in _asked.items()
}


def passes_question_on(code: CodeType) -> bool:
    """Return whether this is the code of another function of torch's that asks the first question."""
    return code.co_name == "is_compiling" and code.co_filename.endswith(_WRAPPERS)


def replace_compiling_questions(answer: Callable[[str], bool] | None) -> None:
    """Have both functions call this one with their name; None: answer as torch does.

    Their code is replaced, for other modules have imported them by name. It stays so from the first call on: compiled
    code that asks compares that code, and would be compiled once more wherever it is another one.
    """
    vars(torch.compiler)["_ampkit_answer"] = answer or (lambda question: compiling_truth[question]())
    for name, (function, _) in _asked.items():
        function.__code__ = _asking(name)


_NOTICING: dict[int, list[bool]] = {}  # what each `noticing_compiled_code` has noticed, by the list's id


def notice_compiled_code() -> None:
    """Say that compiled code has run, though it will do so in later calls only."""
    for called in list(_NOTICING.values()):
        called.append(True)


@contextmanager
def noticing_compiled_code() -> Iterator[Callable[[], bool]]:
    """Context that yields a function. It returns whether any thread has called compiled code in the context so far."""
    dynamo: Any = importlib.import_module("torch._dynamo.eval_frame")  # takes a second; so would the first optimizer
    called: list[bool] = []
    enter = private(dynamo, "_maybe_set_eval_frame")

    def noticed(callback: Any) -> Any:
        if callable(callback):  # otherwise the call keeps something from being compiled
            called.append(True)
        return enter(callback)

    with Undo() as undo:
        undo.note(_NOTICING.pop, id(called), None)
        _NOTICING[id(called)] = called
        replace(undo, dynamo, "_maybe_set_eval_frame", noticed)
        yield lambda: bool(called)


_guards = private(torch._C._dynamo, "guards")
# What code that Inductor has written allocates memory with, by name there. No dispatch mode sees it.
_ALLOCATORS = {f"empty_strided_{kind}": private(_guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}


@contextmanager
def seeing_allocations_of_compiled_code(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Context in which `note` is called with each tensor that code of Inductor's allocates."""

    def noting(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*args: Any) -> Tensor:
            tensor = allocate(*args)
            note(tensor)
            return tensor

        never_compile_by_itself(noted)
        return noted

    def put(allocators: dict[str, Callable[..., Tensor]]) -> None:
        for name, allocate in allocators.items():
            setattr(_guards, f"_{name}", allocate)  # where code that is compiled from now on takes it from
        for module in [module for name, module in sys.modules.copy().items() if name.startswith(WRITTEN)]:
            vars(module).update({name: allocators[name] for name in allocators.keys() & vars(module).keys()})

    with Undo() as undo:
        undo.note(put, _ALLOCATORS)
        put({name: noting(allocate) for name, allocate in _ALLOCATORS.items()})
        yield


def _nothing_was_compiled() -> bool:
    # The import takes a second, so who needs none makes none. In the midst of an import, there are no parts of it yet.
    return not hasattr(sys.modules.get("torch._dynamo"), "utils")


def original_code(code: CodeType) -> CodeType | None:
    """Return the code that dynamo has made this code from; None if it was not made by dynamo."""
    if _nothing_was_compiled():
        return None
    made: CodeType | None = private(sys.modules["torch._dynamo"].utils, "orig_code_map").get(code)
    return made


def around_compilations(undo: Undo, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call one function in front of each compilation in this thread, and one behind it, until that is undone.

    A backward that is compiled when it is first called is one of its own.
    """
    handler = private(importlib.import_module("torch._dynamo.callback"), "callback_handler")
    install = private(handler, "install_callbacks")
    thread = threading.get_ident()
    inner: list[bool] = []

    @contextmanager
    def installed(*args: Any, **kwargs: Any) -> Iterator[None]:
        with install(*args, **kwargs), Undo() as compiling:
            if threading.get_ident() == thread and not inner:  # else it is called within another one
                compiling.note(after)
                compiling.note(inner.clear)
                inner.append(True)
                before()
            yield

    replace(undo, handler, "install_callbacks", installed)


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


def untraced(function: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Return the function for compiled code to call as it is. Compiled functions that it calls stay compiled.

    It ends the graph of what calls it. `why` stands in the reason of that graph break.
    """
    made: Callable[..., Any] = torch.compiler.disable(function, reason=why)
    return made


def call_compiled(undo: Undo, module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call(*args, **kwargs)` take the place of `module(*args, **kwargs)`, until that is undone."""
    replace(undo, module, "_compiled_call_impl", call)


def uncompiled_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return `module(*args, **kwargs)`, with its hooks, though `call_compiled` has given it another call."""
    return private(module, "_call_impl")(*args, **kwargs)


class GraphBreak(NamedTuple):
    """Where torch.compile ends a graph and begins another one."""

    reason: str  # what it says of it, the first line
    places: tuple[tuple[str, int], ...]  # file and number of the lines that led there, the innermost last
    text: str  # all that it says


@dataclass(eq=False)
class Compiler:
    """Compiles functions with Inductor, each for one layout of its arguments."""

    _options: dict[str, Any]  # settings of Inductor, as `torch.compile(options=...)` takes them
    graphs: int = 0  # that Inductor was given so far, forward and backward of a function as one

    def compiled(self, function: Callable[..., Any], *, whole: bool = False, **options: Any) -> Callable[..., Any]:
        """Return a function that is compiled in its first call.

        It shares no compiled code with others that were compiled of the same function: dynamo keeps compiled code, and
        a limit of recompilations, by code object, and this one gets a code object of its own. If it is to be `whole`, a
        graph break is an error. It may have settings of Inductor in place of those of the compiler.
        """
        settings = {**self._options, **options}

        def backend(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            with timed_back_to_back():
                return inductor()(graph, inputs, config_patches=settings)

        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, None)
        made: Callable[..., Any] = torch.compile(own, backend=backend, dynamic=False, fullgraph=whole)
        return made

    @contextmanager
    def for_many(self, modules: int) -> Iterator[None]:
        """Context in which so many modules may be compiled from the same source, and backward as soon as forward.

        Otherwise dynamo gives up a function that it has compiled 8 times, and AOTAutograd compiles a backward when it
        is called first. An error would then come from within a backward, of which a part is done.
        """
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        functorch: Any = importlib.import_module("torch._functorch.config")
        limit = private(dynamo, "recompile_limit")
        private(functorch, "force_non_lazy_backward_lowering")
        with dynamo.patch(recompile_limit=limit + 2 * modules), functorch.patch(force_non_lazy_backward_lowering=True):
            yield

    @contextmanager
    def for_many_backwards(self) -> Iterator[None]:
        """Context in which backward may go through compiled code more than once (`retain_graph=True`).

        Outside of it, backward reuses the memory of what forward has kept, and raises an error in such a case.
        """
        functorch: Any = importlib.import_module("torch._functorch.config")
        private(functorch, "donated_buffer")
        with functorch.patch(donated_buffer=False):
            yield

    @contextmanager
    def noting_breaks(self) -> Iterator[list[GraphBreak]]:
        """Context that yields a list, in which the graph breaks of compilations in the context are at its end."""
        dynamo: Any = importlib.import_module("torch._dynamo.output_graph")
        reasons: list[Any] = private(dynamo, "graph_break_reasons")
        known = len(reasons)
        found: list[GraphBreak] = []
        with Undo() as undo:
            # Behind a graph break dynamo asks the tensors that it finds there for their gradients, and torch warns.
            keep_warning_filters(undo)
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield found
        for reason in reasons[known:]:
            places = tuple((frame.filename, frame.lineno or 0) for frame in reason.user_stack)
            noted = GraphBreak(next(iter(reason.reason.strip().splitlines()), ""), places, str(reason.reason))
            if noted not in found:
                found.append(noted)


def cause_of(error: Exception) -> Exception:
    """Return the error that a backend raised, if torch.compile has raised this one because of it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def inductor() -> Callable[..., Any]:
    """Return the function that compiles a graph with Inductor."""
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")  # takes seconds
    return compile_fx.compile_fx  # type: ignore[no-any-return]  # not annotated as it is called here


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


def compiled_part(models: Mapping[str, nn.Module], name: str, function: object) -> str:
    """Return the name of what torch.compile has compiled already, "" if that is neither the function nor a module."""
    if hasattr(function, "get_compiler_config"):
        return name
    for path, model in models.items():
        for inside, module in model.named_modules():
            if is_compiled(module) or is_compiled_in_place(module):
                return f"{path}.{inside}" if inside else path
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(...)` returned this module. The hooks of modules inside it do not run."""
    # Checkpoints have "_orig_mod" in the names of parameters, so torch cannot rename this child.
    return "get_compiler_config" in vars(module) and "_orig_mod" in module_tables(module)[2]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. The module's hooks then run in compiled code, if at all."""
    return vars(module).get("_compiled_call_impl") is not None
