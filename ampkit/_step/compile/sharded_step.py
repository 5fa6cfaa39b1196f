"""A compiled training step of a model under `fully_shard`."""

import time
from collections import Counter
from typing import Any

from torch import Tensor

from ..._text import ProgressBar
from ..._torch.compile import GraphBreak
from .compiled import CompiledLayout, CompiledTrainingStep, call_loss
from .compiled_shards import CompiledShards, is_of_wrapper


class ShardedCompiledStep(CompiledTrainingStep):
    """A compiled step whose modules are compiled one by one, see `CompiledShards`.

    There are no working weights, because `fully_shard` casts weights where it gathers them. Each rank compiles by
    itself. A part that cannot be compiled is called as eager code from then on, and no call is made again.
    """

    def _compiled_loss(self, layout: CompiledLayout) -> CompiledShards:
        if layout.call is None:
            layout.call = CompiledShards(call_loss, self._model, self.compiler, self._generators)
        assert isinstance(layout.call, CompiledShards)  # of this step's own layouts
        return layout.call

    def _compiled_pass(
        self, layout: CompiledLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        with self._compiled_loss(layout).in_place():  # in backward too: activation checkpoints call modules there
            return super()._compiled_pass(layout, args, kwargs)

    def _compile(self, layout: CompiledLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        start, bar = time.perf_counter(), ProgressBar(1)
        shards = self._compiled_loss(layout)
        try:
            bar.show(f"{self._where}: compiling forward and backward")
            with self.compiler.noting_breaks() as breaks, shards.compiling(self._leaves):
                outputs = self._compiled_pass(layout, args, kwargs)
        finally:
            bar.clear()
            self._seconds += time.perf_counter() - start
        layout.ready = True
        self._say_breaks(layout, breaks)
        self._say_time("forward and backward", time.perf_counter() - start)
        for problem in shards.problem_texts():
            self._say_problem(problem)
        return outputs

    def _say_breaks(self, layout: CompiledLayout, breaks: list[GraphBreak]) -> None:
        super()._say_breaks(layout, [found for found in breaks if not is_of_wrapper(found)])

    def _why_not_updated(self) -> str:
        return "all ranks share the norm and the overflow check of parameters that fully_shard has split"

    def _compiled_passes(self, done: list[CompiledLayout]) -> list[str]:
        parts = [self._compiled_loss(layout) for layout in done]
        counted = Counter(text for shards in parts if (text := shards.compiled_text()))
        lines = [
            f"compiled: forward and backward of {text}, for {n} layout(s) of the batch" for text, n in counted.items()
        ]
        return lines + [f"not compiled: {problem}" for shards in parts for problem in shards.problem_texts()]
