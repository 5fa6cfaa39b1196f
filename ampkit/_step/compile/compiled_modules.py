"""The modules that a function calls, compiled one by one. The function itself runs as Python.

torch.compile would end its graph at each `backward()` and `step()` of such a function. So what is compiled are the
calls of declared modules, and of modules inside of these, that the function makes itself: each with all that it calls,
forward and backward.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._capture.engine.layouts import MAX_LAYOUTS
from ..._capture.engine.options import Options
from ..._capture.keys.inputs import read_batch
from ..._torch.autograd.autograd import in_graph_task
from ..._torch.compile import Compiler, call_compiled, notice_compiled_code, uncompiled_call
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo, replace
from .compilations import Compilations
from .compiled import INDUCTOR_OPTIONS, settings_of
from .compiled_parts import CompiledParts, is_one_layer, listed


@dataclass(eq=False)
class _FunctionLayout:
    """What is known of one layout of the function's arguments."""

    parts: CompiledParts
    calls: Counter[nn.Module] = field(default_factory=Counter)  # that the function has made itself in its first call
    names: list[str] = field(default_factory=list)  # of what is compiled
    compiled: dict[nn.Module, Callable[..., Any]] | None = None  # what is called in its place; None before a first call
    twice: set[nn.Module] = field(default_factory=set)  # modules through which gradients of gradients go
    ready: bool = False  # whether it was compiled
    breaks: list[str] = field(default_factory=list)  # in words


class CompiledModules:
    """Has the modules that a function calls run as compiled code, for each layout of its arguments by itself.

    The first call of a layout is not compiled, and shows which modules the function calls. The second one compiles
    these. So all later calls run the same code, captured or not, and have the same bits. Single layers of torch.nn are
    left as they are, because they are one kernel or two.

    If the compilation of a module fails, it is called as eager code from then on; a warning says why, once. One through
    which gradients of gradients go is not compiled, because torch.compile has no second backward.

    Args:
        modules: by their paths in messages.
        device: where the arguments are.
        compile: "default" or "max", see `graphed_step`.
        options: with `on_failure="raise"`, a compilation that fails is an error, in the next call. `generators` are
            those that the modules draw from, beside torch's own.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, compile: str, options: Options) -> None:
        self._roots, self._device, self._generators = modules, device, options.generators
        self._compilations = Compilations(f"graphed(compile={compile!r})", options.on_failure == "raise")
        self._compiler = Compiler(INDUCTOR_OPTIONS[compile])
        self._params: list[nn.Parameter] = []
        self._layouts: dict[Hashable, _FunctionLayout] = {}
        self._within = False  # whether a module runs that the function has called

    @contextmanager
    def calling(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context for a call of the function with these arguments."""
        self._compilations.refuse_failed()
        notice_compiled_code()  # the rehearsal compares no numbers around compiled code
        layout = self._layout_of(args, kwargs)
        if layout is None:
            yield
            return
        if layout.compiled is None:
            with Undo() as undo:
                layout.calls.clear()
                layout.twice.clear()
                replace(undo, self, "_within", False)
                for module in self._modules():
                    call_compiled(undo, module, partial(self._noted, layout, undo, module))
                yield
            self._make(layout)  # last: a call that raised has shown nothing
            return
        with Undo() as undo, self._compiler.for_many_backwards():
            for module, call in layout.compiled.items():
                call_compiled(undo, module, call)
            if layout.ready:
                yield
                return
            replace(undo, layout.parts, "watches", True)
            timing = self._compilations.compiling(f"forward and backward of {listed(layout.names)}")
            many = self._compiler.for_many(layout.calls.total())
            with timing, self._compiler.noting_breaks() as breaks, many:
                yield
        layout.ready = True
        layout.breaks += self._compilations.named_breaks(breaks)
        for problem in layout.parts.problem_texts():
            self._compilations.say_problem(problem)

    def _layout_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FunctionLayout | None:
        """Return what is known of these arguments. None if there were too many others, which is said once."""
        modules = self._modules()
        params = list(dict.fromkeys(param for root in self._roots.values() for param in root.parameters()))
        if list(map(id, params)) != list(map(id, self._params)):
            self._layouts.clear()  # begin anew, since the modules have other parameters
            self._params = params
        spec, _ = read_batch(args, kwargs, self._device)
        key = settings_of(spec, modules, params, self._device.type)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == MAX_LAYOUTS:
                self._compilations.say_left_out(f"calls with arguments of more than {MAX_LAYOUTS} layouts")
                return None
            buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
            parts = CompiledParts(buffers, self._generators)
            layout = self._layouts[key] = _FunctionLayout(parts)
        return layout

    def _noted(self, layout: _FunctionLayout, behind: Undo, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, and note the call, unless another one of these modules or a backward makes it."""
        if self._within or in_graph_task():
            return uncompiled_call(module, *args, **kwargs)
        layout.calls[module] += 1
        with Undo() as undo:
            replace(undo, self, "_within", True)
            returned = uncompiled_call(module, *args, **kwargs)

        def note(_: Tensor) -> None:
            if torch.is_grad_enabled():  # as in a backward with create_graph=True
                layout.twice.add(module)

        for tensor in tensors_in(returned):
            if tensor.requires_grad:
                behind.note(tensor.register_hook(note).remove)
        return returned

    def _make(self, layout: _FunctionLayout) -> None:
        names, layout.compiled = self._modules(), {}
        for module in layout.calls:
            if is_one_layer(module):
                continue
            if module in layout.twice:
                layout.parts.problems[names[module]] = "gradients of gradients go through it"
            else:
                compiled = partial(self._compiler.compiled(uncompiled_call), module)
                run = partial(layout.parts.run, names[module], compiled, partial(uncompiled_call, module))
                layout.compiled[module] = run
        layout.names = [names[module] for module in layout.compiled]
        for problem in layout.parts.problem_texts():
            self._compilations.say_problem(problem)
        if not layout.compiled:
            layout.ready = True
            if not layout.parts.problems:
                self._compilations.say_left_out("the function calls no module itself that has more than one layer")

    def _modules(self) -> dict[nn.Module, str]:
        """Return the modules, and all inside, with their paths."""
        seen: set[nn.Module] = set()
        return {
            module: name
            for path, root in self._roots.items()
            for name, module in root.named_modules(memo=seen, prefix=path)
        }

    def report(self) -> dict[str, Any]:
        """Return the fields of the report that say what was compiled."""
        done = [layout for layout in self._layouts.values() if layout.ready]
        parts = [[name for name in layout.names if name not in layout.parts.problems] for layout in done]
        counted = Counter(listed(names) for names in parts if names)
        lines = [
            f"compiled: forward and backward of {text}, for {n} layout(s) of the arguments"
            for text, n in counted.items()
        ]
        lines += [f"not compiled: {problem}" for layout in done for problem in layout.parts.problem_texts()]
        lines += [f"graph break: {text}" for layout in done for text in layout.breaks]
        return {"compile_s": round(self._compilations.seconds, 3), "compiled": tuple(dict.fromkeys(lines))}
