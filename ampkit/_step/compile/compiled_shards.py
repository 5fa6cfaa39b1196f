"""A compiled training step of a model under `fully_shard`: its modules, each by itself, and the loss around them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._capture.state.snapshot import Snapshot
from ..._torch.compile import Compiler, call_compiled, uncompiled_call, untraced
from ..._torch.ranks.sharding import wrapped_modules
from ..._undo import Undo, replace
from .compiled import CompiledLayout, CompiledTrainingStep, call_loss
from .compiled_parts import CompiledParts, is_one_layer, listed
from .compiled_writes import why_failed

LOSS = "the loss"
_WHY = "ampkit compiles the modules under fully_shard by themselves"  # a graph ends at the call of such a module
_Calling = list[tuple[nn.Module, Callable[..., Any]]]  # modules, and what is called instead


class CompiledShards(CompiledParts):
    """The compiled code of a loss, and of the modules that it calls, for one layout of its arguments.

    `fully_shard` gathers parameters in hooks before a module's forward, and frees them in hooks behind it. No compiler
    follows these hooks, so every call of a module under `fully_shard` is eager code. What is compiled is the forward of
    such a module, if it has no other one inside, and the calls of modules between them. The loss is compiled around
    the model: its graph ends at the call of the model and goes on behind it.

    So the collectives are the same, in the same order, whether a part is compiled or not. A rank may compile while
    others do not. If the compilation of a part fails, this part is made again as eager code at its place, from the
    buffers and random numbers before it, and no collective is made twice.
    """

    def __init__(self, model: nn.Module, compiler: Compiler, generators: Sequence[torch.Generator]) -> None:
        super().__init__(list(model.buffers()), generators)
        self._compiler = compiler
        self._compiled_loss = compiler.compiled(call_loss)
        self._first = False  # whether the call that runs compiles
        self._leaves: Sequence[Any] = ()  # of the batch of that call
        self._calls: _ModelCalls | None = None  # the calls that the loss makes of the model, while it is compiled
        eager, wrapped, between = parts_of(model)
        names = {module: name or "the model" for name, module in model.named_modules()}
        self.names = [LOSS, *(names[module] for module in (*wrapped, *between))]
        self._outer: _Calling = [(module, untraced(partial(self._call_outer, module), _WHY)) for module in eager]
        forward, call = map(compiler.compiled, (_call, uncompiled_call))  # modules that are alike share their code
        self._forwards: _Calling = [
            (module, partial(self.run, names[module], partial(forward, module.forward), module.forward))
            for module in wrapped
        ]
        self._between: _Calling = [
            (module, partial(self.run, names[module], partial(call, module), partial(uncompiled_call, module)))
            for module in between
        ]

    def __call__(self, *args: Any) -> Any:
        """Return what the loss returns."""
        if LOSS in self.problems:
            return call_loss(*args)
        if not self._first:
            return self._compiled_loss(*args)
        before, calls = self.snapshot(self._leaves), _ModelCalls()
        with Undo() as undo:
            replace(undo, self, "_calls", calls)
            replace(undo, self, "watches", True)
            try:
                return self._compiled_loss(*args)
            except Exception as error:
                if calls.has_raised:
                    raise
                before.restore()
                calls.left = list(calls.made)
                returned = call_loss(*args)  # if this raises too, it was not the compiler that failed
                self.problems[LOSS] = why_failed(error)
                return returned

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context for forward and backward, in which the modules call their compiled code. Then they are as before."""
        with Undo() as undo:
            for module, forward in self._forwards:
                replace(undo, module, "forward", forward)
            for module, call in self._outer + self._between:
                call_compiled(undo, module, call)
            yield

    @contextmanager
    def compiling(self, leaves: Sequence[Any]) -> Iterator[None]:
        """Context for the call that compiles, which has these leaves in its batch."""
        with Undo() as undo, self._compiler.for_many(len(self.names)):
            replace(undo, self, "_first", True)
            replace(undo, self, "_leaves", leaves)
            yield

    def _call_outer(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module that communicates. In a loss that is called again, return what the same call has returned."""
        calls = self._calls
        if calls is None or calls.within:
            return uncompiled_call(module, *args, **kwargs)
        if calls.left:
            returned, after = calls.left.pop(0)
            after.restore()
            return returned
        calls.within = True
        try:
            returned = uncompiled_call(module, *args, **kwargs)
        except BaseException:
            calls.has_raised = True
            raise
        finally:
            calls.within = False
        calls.made.append((returned, self.snapshot(self._leaves)))
        return returned


@dataclass(eq=False)
class _ModelCalls:
    """The calls of a model in a loss, so that the loss can be called again without them."""

    made: list[tuple[Any, Snapshot]] = field(default_factory=list)  # what each has returned, and the state behind it
    left: list[tuple[Any, Snapshot]] = field(default_factory=list)  # those that are to return the same once more
    within: bool = False  # whether one of them runs, which may call others
    has_raised: bool = False  # whether one of them has raised an error


def parts_of(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return the modules whose calls communicate; those of them whose forward does not; and what is between them.

    The second ones are under `fully_shard` and have no other such module inside. The third ones are not, and as large
    as can be. Single layers of torch.nn are left out of both, because they are one kernel or two.
    """
    wrapped = set(wrapped_modules(model))
    inside = {module: wrapped.intersection(module.modules()) for module in model.modules()}
    eager = [module for module, some in inside.items() if some]
    whole = [module for module in eager if inside[module] == {module}]
    between: list[nn.Module] = []
    left = [child for module in eager if module not in whole for child in module.children()]
    for module in left:  # grows
        if inside[module] or module in between:
            continue
        if type(module).forward is nn.Module.forward:  # a list or a dictionary of modules
            left += module.children()
        else:
            between.append(module)
    whole, between = ([each for each in found if not is_one_layer(each)] for found in (whole, between))
    return eager, whole, between


def _call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


class ShardedCompiledStep(CompiledTrainingStep):
    """A compiled step whose modules are compiled one by one, see `CompiledShards`.

    There are no working weights, because `fully_shard` casts weights where it gathers them. Each rank compiles by
    itself. A part that cannot be compiled is called as eager code from then on, and no call is made again.
    """

    intended = (*CompiledTrainingStep.intended, _WHY)

    def _compiled_loss(self, layout: CompiledLayout) -> CompiledShards:
        if layout.call is None:
            layout.call = CompiledShards(self._model, self.compiler, self._generators)
        assert isinstance(layout.call, CompiledShards)  # of this step's own layouts
        return layout.call

    def _compiled_pass(
        self, layout: CompiledLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        with self._compiled_loss(layout).in_place():  # in backward too: activation checkpoints call modules there
            return super()._compiled_pass(layout, args, kwargs)

    def _compile(self, layout: CompiledLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        shards = self._compiled_loss(layout)
        compiling = shards.compiling(self._leaves)
        timing = self._compilations.compiling("forward and backward")
        with timing, self.compiler.noting_breaks() as breaks, compiling:
            outputs = self._compiled_pass(layout, args, kwargs)
        layout.ready = True
        layout.breaks += self._compilations.named_breaks(breaks)
        for problem in shards.problem_texts():
            self._compilations.say_problem(problem)
        return outputs

    def _compiled_passes(self, done: list[CompiledLayout]) -> list[str]:
        parts = [self._compiled_loss(layout) for layout in done]
        compiled = [listed([name for name in shards.names if name not in shards.problems]) for shards in parts]
        counted = Counter(filter(None, compiled))
        lines = [
            f"compiled: forward and backward of {text}, for {n} layout(s) of the batch" for text, n in counted.items()
        ]
        return lines + [f"not compiled: {problem}" for shards in parts for problem in shards.problem_texts()]
