"""`AmpkitCallback(compile=...)`: `training_step` is compiled, and what Lightning does around it is not."""

import warnings
from typing import Any

from torch import nn

from .._errors import AmpkitWarning
from .._step.compile.compiled import CompiledTrainingStep
from .._torch.compile import GraphBreak
from ._host_state import HostReads

WARM_UP = 3  # calls at least: the first is not compiled, the second compiles, the third is the rehearsal


class CompiledBatchStep(CompiledTrainingStep):
    """A compiled step whose loss function compiles a part of itself.

    The loss function gets `call` in a call that is compiled: `call(function, module, args, {})` calls
    `function(module, *args)` as compiled code.
    """

    def _call_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        if layout is None or layout.problem:
            return super()._call_loss(args, kwargs)
        return self._loss_fn(self._model, *args, **kwargs, call=self._compiled_loss(layout))

    def _say_breaks(self, layout: Any, breaks: list[GraphBreak]) -> None:
        """Say nothing of `self.log`: its calls are noted outside of compiled code, as Lightning's own would be."""
        super()._say_breaks(layout, [found for found in breaks if "_LogRecorder" not in found.text])


def training_step_of(module: nn.Module, *args: Any) -> Any:
    """Return what `training_step` returns. This is what is compiled."""
    return module.training_step(*args)  # type: ignore[operator]  # a LightningModule's


def read_compile(compile: str | None, host_reads: HostReads) -> str | None:
    """Return what to compile with. It is None, with a warning, if `training_step` uses the number of the batch."""
    if compile is not None and host_reads.reads_index:
        warnings.warn(
            f"AmpkitCallback(compile={compile!r}): training_step uses batch_idx, and each number would be compiled by "
            "itself, so nothing is compiled. Leave batch_idx out, or count batches in a buffer.",
            AmpkitWarning,
            stacklevel=2,
        )
        return None
    return compile
