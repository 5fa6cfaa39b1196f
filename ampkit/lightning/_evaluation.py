"""Validation and test with captured steps: what ampkit replaces in a Trainer, and a batch as a call of the engine."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
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
from .._step.step_function import set_gradients
from .._step.training_step import Phase
from .._torch.autograd.backward_thread import run_backwards_here
from .._undo import Undo
from . import _log_calls
from ._host_state import HostReads, HostWrites, not_comparable, not_returnable
from ._limits import why_not_module
from ._metric_calls import all_made
from ._trainer_reads import TrainerReads

# The step that Lightning calls in a stage of the Trainer, beside `training_step`.
STEP_OF = {"fit": "validation_step", "validate": "validation_step", "test": "test_step"}
STEPS = ("validation_step", "test_step")
_WRITES_ELSEWHERE = (
    "{0} changes a tensor that was made in inference mode and is no buffer of the module. Make it a buffer, or use "
    "Trainer(inference_mode=False)."
)
_FEW_LOADERS = "Pass fewer dataloaders than max_graphs."
_LEAVES_GRADIENTS = (
    "{0} leaves gradients of parameters, and a captured step would leave none. Let it end with self.zero_grad(), or "
    "pass AmpkitCallback(validate=False)."
)


class Evaluation:
    """Replaces `validation_step` or `test_step` of a Trainer's strategy; `end` puts the original back.

    To be made before anything else of the Trainer is replaced. `give_up` is called with the reason if the step is left
    to Lightning. It issues a warning, or raises.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, name: str, options: Options, give_up: Callable[[str], None]
    ) -> None:
        self._trainer, self._module, self._name = trainer, module, name
        self._options, self._give_up = options, give_up
        self._why_not = _why_not_in(trainer, name, options)  # Lightning makes all further calls, unless it is ""
        self._engine: Engine | None = None  # made in the first call
        self._further_args: tuple[Any, ...] = ()  # of the step, after the batch
        self._loaders_seen: set[int] = set()
        self._problem = ""  # found in the current call
        self._lightning_step = getattr(trainer.strategy, name)
        if not self._why_not:
            vars(trainer.strategy)[name] = self._call

    def end(self) -> None:
        """Put the step back and release the graphs."""
        vars(self._trainer.strategy).pop(self._name, None)
        if self._engine is not None:
            self._engine.close_in_turn()

    def report(self) -> Report:
        """Return graphs, replays, and eager calls with reasons, so far. Waits for the device."""
        report = Report() if self._engine is None else self._engine.report()
        return replace(report, failure=self._why_not) if self._why_not else report

    def _call(self, batch: Any, *further_args: Any) -> Any:
        """Take the place of `Strategy.validation_step` or `Strategy.test_step`. Its `self.log` is called after it.

        The further arguments are the index of the batch, and that of the dataloader if there are several. Sync: none.
        """
        # In the sanity check a step may do something else, and there are few batches.
        if self._why_not or self._trainer.sanity_checking:
            return self._lightning_step(batch, *further_args)
        if self._engine is None:
            problem, name = why_not_module(self._module, self._trainer.strategy), self._name
            if "dataloader_iter" in inspect.signature(getattr(self._module, name)).parameters:
                kind = type(self._module).__name__
                problem = f"{kind}.{name} takes its batches from dataloader_iter. Write {name}(self, batch)."
            if problem:
                self._leave_to_lightning(problem)
                return self._lightning_step(batch, *further_args)
            self._engine = self._make_engine()
        engine = self._engine
        loader = Part("dataloader_idx", further_args[1] if len(further_args) > 1 else 0, _FEW_LOADERS)
        parts = (*self._host_reads.parts(self._trainer.current_epoch), loader)
        phase = Phase(last=True, accumulated=(), others=parts)  # a report says nothing of it
        self._further_args, self._problem = further_args, ""
        replays = engine.replays
        try:
            outputs = engine.turn.call(self._called, engine, phase, batch)
        except InputMismatch as error:
            engine.close()
            self._leave_to_lightning(not_comparable(batch) or str(error))
            return self._lightning_step(batch, *further_args)
        ((template, tensors),) = outputs.items()
        output, log_calls = template.filled(iter(tensors))
        self._log(log_calls)
        if engine.replays == replays:
            problem = not_comparable(batch) or self._problem or self._numbers.problem(log_calls, batch, phase)
            if problem:
                engine.close()
                self._leave_to_lightning(problem)
        return output

    def _make_engine(self) -> Engine:
        module, device = self._module, self._trainer.strategy.root_device
        self._host_reads = HostReads(module, self._name)
        self._trainer_reads = TrainerReads(self._trainer, module, self._host_reads, self._name)
        self._numbers = _log_calls.LoggedNumbers(self._name)
        self._log = _log_calls.LogForwarder(
            module, device, False, lambda: self._trainer.strategy.precision_plugin.forward_context()
        )
        session = Session(
            fn=self._captured,
            captured=self._captured,
            state=TrainingState({"model": module}, ()),
            device=device,
            options=self._options,
            ranks=Ranks(None, device),
            name=f"AmpkitCallback, {self._name}",
            declared=True,
            one_argument=True,
        )
        return Engine(session)

    def _called(self, engine: Engine, phase: Phase, batch: Any) -> Any:
        """Call through the engine, but the first batch of each dataloader without it.

        The other ones leave inference mode, and there a step may not write to tensors that were made in it, such as the
        state of a metric after the sanity check. A step that updates a metric is found in the first batch.
        """
        loader = phase.others[-1].value
        if loader in self._loaders_seen:
            return engine((batch,), {}, phase)
        self._loaders_seen.add(loader)
        values = [value for part in self._module.modules() for value in vars(part).values()]
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_inference()]
        before = [(tensor, tensor.clone()) for tensor in tensors]
        outputs = engine.run("warm-up", lambda: self._recorded(batch))
        if any(not torch.equal(tensor, value) for tensor, value in before):  # sync, in inference mode alone
            self._problem = self._problem or _WRITES_ELSEWHERE.format(self._name)
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
                HostWrites(self._module, index, self._name) as writes,
                _log_calls.recorded(self._module, self._log) as log_calls,
                self._trainer_reads.watching(),
            ):
                output = all_made(self._lightning_step(own_batch(batch), *self._further_args))
            if any(param.grad is not None for param in params):
                self._problem = self._problem or _LEAVES_GRADIENTS.format(self._name)
        output = dict(output) if isinstance(output, Mapping) else output
        self._problem = self._problem or writes.problem or not_returnable(output, self._name)
        template = _log_calls.Template((output, log_calls))
        return {template: template.take_tensors()}

    def _leave_to_lightning(self, problem: str) -> None:
        self._why_not = problem
        self._give_up(
            f"{problem} Lightning calls {self._name} without a graph from here on. AmpkitCallback(validate=False) "
            "leaves all of validation and test to Lightning."
        )


def _why_not_in(trainer: Trainer, step: str, options: Options) -> str:
    """Return why this Trainer does not let the step be captured, "" if it does."""
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    if options.graph == "off":
        return "graph='off'"
    name, kind = type(strategy).__name__, type(strategy)
    if not isinstance(strategy, SingleDeviceStrategy) or strategy.root_device.type not in ("cpu", "cuda"):
        return f"{name}: validation and test are captured on one device only."
    if problem := options.why_not_on(strategy.root_device):
        return problem
    if getattr(kind, step) is not getattr(Strategy, step):
        return f"{name} has a {step} of its own."
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        return f"Trainer(precision={plugin.precision!r}), {type(plugin).__name__}, is not supported."
    return ""
