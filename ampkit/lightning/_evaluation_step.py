"""One batch of validation or test as one call of the engine: what is recorded, what is checked, when to stay eager."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.engine.session import Session
from .._capture.engine.warm_up import writable
from .._capture.graph.report import Report
from .._capture.keys.containers import own_batch
from .._capture.keys.key import Part
from .._capture.ranks.ranks import Ranks
from .._capture.state.state import TrainingState
from .._errors import InputMismatch
from .._step.graphed import set_gradients
from .._torch.autograd.backward_thread import run_backwards_here
from .._undo import Undo
from . import _log_calls
from ._host_state import HostReads, HostWrites, not_comparable, not_returnable
from ._trainer_reads import TrainerReads

_WRITES_ELSEWHERE = (
    "{0} changes a tensor that was made in inference mode and is no buffer of the module. Make it a buffer, or use "
    "Trainer(inference_mode=False)."
)
_FEW_LOADERS = "Pass fewer dataloaders than max_graphs."
_LEAVES_GRADIENTS = (
    "{0} leaves gradients of parameters, and a captured step would leave none. Let it end with self.zero_grad(), or "
    "pass AmpkitCallback(validate=False)."
)


class EvaluationPhase(NamedTuple):
    """What a graph of an evaluation step belongs to, beside its batch."""

    others: tuple[Part, ...]  # the values that the step reads on the host, and the dataloader
    words: str = ""  # a report says nothing of the phase, since each method has a report of its own

    def parts(self) -> list[Part]:
        """Return what messages name if it varies from call to call."""
        return list(self.others)


class EvaluationStep:
    """Calls `validation_step` or `test_step`, eagerly or as a graph.

    `forward(batch, *rest)` calls the step as Lightning does, with precision. `give_up` is called with the reason when
    no further call will be captured. It issues a warning, or raises.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        method: str,
        module: LightningModule,
        trainer: Trainer,
        *,
        device: torch.device,
        options: Options,
        give_up: Callable[[str], None],
    ) -> None:
        self._forward = forward
        self._method = method
        self._module = module
        self._give_up = give_up
        self._host_reads = HostReads(module, method)
        self._trainer_reads = TrainerReads(trainer, module, self._host_reads, method)
        self._numbers = _log_calls.LoggedNumbers(method)
        self._log = _log_calls.LogForwarder(module, device, on_step=False)
        self._further_args: tuple[Any, ...] = ()  # of the step, after the batch
        self._loaders_seen: set[int] = set()
        self._problem = ""  # found in the current call
        self._why_eager = ""  # why Lightning makes all further calls; "" while ampkit makes them
        session = Session(
            fn=self._captured,
            captured=self._captured,
            state=TrainingState({"model": module}, ()),
            device=device,
            options=options,
            ranks=Ranks(None, device),
            name=f"AmpkitCallback, {method}",
            declared=True,
            one_argument=True,
        )
        self._engine = Engine(session)

    def report(self) -> Report:
        """Return graphs, replays, and eager calls with reasons, so far. Waits for the device."""
        return self._engine.report()

    def close(self) -> None:
        """Release the graphs."""
        self._engine.close_in_turn()

    def __call__(self, epoch: int, batch: Any, *further_args: Any) -> Any:
        """Return what the step returned. Its calls of `self.log` are made after it. Sync: none.

        Its further arguments are the index of the batch, and that of the dataloader if there are several.
        """
        if self._why_eager:
            return self._forward(batch, *further_args)
        loader = Part("dataloader_idx", further_args[1] if len(further_args) > 1 else 0, _FEW_LOADERS)
        phase = EvaluationPhase((*self._host_reads.parts(epoch), loader))
        self._further_args, self._problem = further_args, ""
        replays = self._engine.replays
        try:
            outputs = self._engine.turn.call(self._called, phase, batch)
        except InputMismatch as error:
            self._stay_eager(not_comparable(batch) or str(error))
            return self._forward(batch, *further_args)
        ((template, tensors),) = outputs.items()
        output, log_calls = template.filled(iter(tensors))
        self._log(log_calls)
        if self._engine.replays == replays:
            problem = not_comparable(batch) or self._problem or self._numbers.problem(log_calls, batch, phase)
            if problem:
                self._stay_eager(problem)
        return output

    def _called(self, phase: EvaluationPhase, batch: Any) -> Any:
        """Call through the engine, but the first batch of each dataloader without it.

        The other ones leave inference mode, and there a step may not write to tensors that were made in it, such as the
        state of a metric after the sanity check. A step that updates a metric is found in the first batch.
        """
        loader = phase.others[-1].value
        if loader in self._loaders_seen:
            return self._engine((batch,), {}, phase)
        self._loaders_seen.add(loader)
        values = [value for part in self._module.modules() for value in vars(part).values()]
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_inference()]
        before = [(tensor, tensor.clone()) for tensor in tensors]
        outputs = self._engine.run("warm-up", lambda: self._recorded(batch))
        if any(not torch.equal(tensor, value) for tensor, value in before):  # sync, in inference mode alone
            self._problem = self._problem or _WRITES_ELSEWHERE.format(self._method)
        return outputs

    def _captured(self, phase: Hashable, batch: Any) -> dict[_log_calls.Template, list[Tensor]]:
        """Call the step under `no_grad` in place of inference mode. A graph holds what this function does.

        Both compute the same. But the preflight, a dispatch mode, would change what is computed in inference mode.
        """
        if not torch.is_inference_mode_enabled():
            return self._recorded(batch)
        with writable((batch,), {}) as ((given,), _), torch.inference_mode(False), torch.no_grad():
            return self._recorded(given)

    def _recorded(self, batch: Any) -> dict[_log_calls.Template, list[Tensor]]:
        """Call the step, and note what a replay would not do."""
        self._further_args, index = self._host_reads.watch_index(self._further_args)
        params = list(self._module.parameters())
        with Undo() as undo:
            # Casts that were captured live in the graph's pool and must not be seen outside.
            undo.note(torch.clear_autocast_cache)
            run_backwards_here(undo)
            undo.note(set_gradients, params, [param.grad for param in params])
            torch.clear_autocast_cache()
            set_gradients(params, [None] * len(params))
            with (
                HostWrites(self._module, index, self._method) as writes,
                _log_calls.recorded(self._module, self._log) as log_calls,
                self._trainer_reads.watching(),
            ):
                output = self._forward(own_batch(batch), *self._further_args)
            if any(param.grad is not None for param in params):
                self._problem = self._problem or _LEAVES_GRADIENTS.format(self._method)
        output = dict(output) if isinstance(output, Mapping) else output
        self._problem = self._problem or writes.problem or not_returnable(output, self._method)
        template = _log_calls.Template((output, log_calls))
        return {template: template.take_tensors()}

    def _stay_eager(self, reason: str) -> None:
        self._why_eager = reason
        self._engine.close()
        self._give_up(reason)
