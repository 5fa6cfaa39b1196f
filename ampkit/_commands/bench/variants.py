"""The variants of a training step that are compared: torch's own, a capture made by hand, and ampkit's."""

import copy
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.optim.lr_scheduler import CosineAnnealingLR

from ..._batches.prefetch import prefetch
from ..._capture.graph.graph import CudaGraph, Pool
from ..._optimizer.scaler import GradScaler
from ..._precision.policy import Policy
from ..._step.graphed_step import graphed_step
from .cases import Batch, Case

MAX_NORM = 1.0
# The first step must not overflow: torch's fused SGD would leave its momentum uninitialised (see seed_momentum).
INIT_SCALE = 1024.0

_SCAN = 96  # steps per call, in launches of 16
OnLoss = Callable[[Tensor], None]


class Setting(NamedTuple):
    """What all variants have in common."""

    policy: Policy
    device: torch.device
    source: str = "prefetch"  # of the batches, a key of `INPUTS`
    schedule: int = 20  # the learning rate falls to 0 in this many steps, along a cosine, and then rises again


class Loop(NamedTuple):
    """A training loop that is ready to run.

    `train(batches, on_loss)` does a step on each batch of the case, and calls `on_loss` with each loss, which the next
    step may overwrite.
    """

    train: Callable[[Iterable[Batch], OnLoss], None]
    step: Callable[..., Tensor] | None = None  # on a batch on the device; None if only the whole loop can be called
    report: Callable[[], dict[str, Any]] | None = None  # of ampkit, for the JSON file


@dataclass(frozen=True)
class Variant:
    """One way to write the step."""

    label: str  # its name in tables
    build: Callable[[Case, Setting], Loop]
    whole: bool = True  # whether it clips, follows the schedule and takes its input from the host
    needs_cuda: bool = False
    default: bool = True  # whether it is measured if `--variants` is not given
    quick: bool = False  # whether `--quick` measures it
    compiles: bool = False  # whether it uses torch.compile
    on_cpu: str = ""  # its name in tables without a CUDA device, "" if that is the label
    together: int = 1  # how many steps its loop does per call, on batches that are stacked


def _model(case: Case, setting: Setting) -> nn.Module:
    model = copy.deepcopy(case.model).to(setting.device, setting.policy.params).train()
    return setting.policy.apply(model) if setting.policy.modules else model


def feed(batches: Iterable[Batch], case: Case, setting: Setting) -> Iterable[Batch]:
    """Return batches of the case on the device, as `loss_fn` takes them."""
    if setting.source == "device":
        return batches
    return prefetch(batches, setting.device, transform=case.decode)


def _loop(
    step: Callable[..., Tensor], case: Case, setting: Setting, report: Callable[[], dict[str, Any]] | None = None
) -> Loop:
    def train(batches: Iterable[Batch], on_loss: OnLoss) -> None:
        for batch in feed(batches, case, setting):
            on_loss(step(*batch))

    return Loop(train, step, report)


# ---------------------------------------------------------------------------------------------------------- torch alone


def torch_amp(
    case: Case, setting: Setting, *, fused: bool = False, mode: str | None = None, whole: bool = True
) -> Loop:
    """Return the loop of torch's AMP examples.

    The fused optimizer does not read the device, torch's default one does. `mode` is that of torch.compile; None does
    not compile. A `whole` step clips and follows the schedule.
    """
    policy, device = setting.policy, setting.device
    model = _model(case, setting)
    optimizer = case.optimizer(model.parameters(), **({"fused": True} if fused else {}))
    scaler = TorchScaler(device.type, INIT_SCALE, enabled=policy.needs_scaling)
    scheduler = CosineAnnealingLR(optimizer, setting.schedule)
    forward = torch.compile(model, mode=mode, dynamic=False) if mode else model

    def step(*batch: Any) -> Tensor:
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with policy.autocast(device.type):
            loss = case.loss_fn(forward, *batch)
        scaler.scale(loss).backward()
        if whole:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if whole:
            scheduler.step()
        return loss.detach()

    return _loop(step, case, setting)


# ------------------------------------------------------------------------------------------------------- made by hand


@dataclass(eq=False)
class _CaptureByHand:
    """Does three eager steps on a side stream, then captures and replays the step, as torch's documentation shows."""

    _body: Callable[[], Tensor]
    _optimizer: torch.optim.Optimizer
    _stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    _eager_steps: int = 0
    _graph: CudaGraph | None = None

    def __call__(self, *_: Any) -> Tensor:
        """Do one step, on the batch that is part of the body."""
        if self._graph is None:
            if self._eager_steps < 3:
                self._eager_steps += 1
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    loss = self._body()
                torch.cuda.current_stream().wait_stream(self._stream)
                return loss
            self._optimizer.zero_grad()
            graph = CudaGraph(self._stream, Pool())
            graph.capture(self._body)
            self._graph = graph
        return self._graph.replay()  # type: ignore[no-any-return]  # what the body returns


def _bare(case: Case, setting: Setting, compiled: bool = False) -> Loop:
    """Capture only forward, backward, scaling and the fused optimizer: the time of the kernels alone."""
    policy, device = setting.policy, setting.device
    model = _model(case, setting)
    optimizer = case.optimizer(model.parameters(), fused=True)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)
        if "capturable" in group:
            group["capturable"] = True
    scaler = TorchScaler(device.type, INIT_SCALE, enabled=policy.needs_scaling)
    scaler.scale(torch.zeros((), device=device))  # allocates the scale outside the capture
    batch = next(iter(feed(case.batches[:1], case, setting)))
    forward = torch.compile(model, dynamic=False) if compiled else model

    def body() -> Tensor:
        optimizer.zero_grad()
        with policy.autocast(device.type):
            loss = case.loss_fn(forward, *batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = _CaptureByHand(body, optimizer)

    def train(batches: Iterable[Batch], on_loss: OnLoss) -> None:
        for _ in batches:
            on_loss(step())

    return Loop(train, step)


# --------------------------------------------------------------------------------------------------------------- ampkit


def _graphed(
    case: Case, setting: Setting, compiled: bool = False, compile: str | None = None, scan: bool = False
) -> Loop:
    """Return `graphed_step` with scaling, clipping and schedule, of a `compiled` model or with `compile=`.

    With `scan`, each batch is a stack of batches.
    """
    policy, device = setting.policy, setting.device
    model = _model(case, setting)
    optimizer = case.optimizer(model.parameters(), fused=True)
    called: Any = torch.compile(model, dynamic=False) if compiled else model
    step = graphed_step(
        case.loss_fn,
        called,
        optimizer,
        policy=policy,
        scaler=GradScaler(device.type, INIT_SCALE, enabled=policy.needs_scaling),
        max_norm=MAX_NORM,
        scheduler=CosineAnnealingLR(optimizer, setting.schedule),
        on_failure="raise",
        graph="auto" if device.type == "cuda" else "emulate",
        compile=compile,
    )
    if scan:
        decoding = case if case.decode is None else replace(case, decode=partial(_decode_each, case.decode))
        loop = _loop(lambda *stacked: step.scan(*stacked).loss, decoding, setting, lambda: step.report().to_dict())
        return loop._replace(step=None)  # what a call takes on the host is no time of a step
    return _loop(lambda *batch: step(*batch).loss, case, setting, lambda: step.report().to_dict())


def _decode_each(decode: Callable[[Batch], Batch], stacked: Batch) -> Batch:
    batches = [decode(batch) for batch in zip(*stacked, strict=True)]
    return tuple(torch.stack(leaves) for leaves in zip(*batches, strict=True))


def has_lightning() -> bool:
    """Return whether the Lightning variant can be built here."""
    return all(importlib.util.find_spec(name) for name in ("lightning", "ampkit.lightning"))


def _lightning(case: Case, setting: Setting) -> Loop:
    """A Lightning Trainer with ampkit's callback and the same input."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import LambdaCallback

    AmpkitCallback = importlib.import_module("ampkit.lightning").AmpkitCallback  # noqa: N806 - a class
    policy, device = setting.policy, setting.device
    scaler = GradScaler(device.type, INIT_SCALE) if policy.needs_scaling else None
    callback = AmpkitCallback(scaler=scaler, on_failure="raise", graph="auto" if device.type == "cuda" else "emulate")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model(case, setting._replace(device=torch.device("cpu")))

        def training_step(self, batch: Batch) -> Tensor:
            return case.loss_fn(self.net, *batch)

        def configure_optimizers(self) -> Any:
            optimizer = case.optimizer(self.net.parameters(), fused=True)
            return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, setting.schedule), "interval": "step"}]

    def train(batches: Iterable[Batch], on_loss: OnLoss) -> None:
        losses = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: on_loss(outputs["loss"]))
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1 if device.index is None else [device.index],
            max_epochs=1,
            gradient_clip_val=MAX_NORM,
            callbacks=[losses, callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **lightning_precision(policy, device),
        )
        trainer.fit(Module(), feed(batches, case, setting))

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # no list of devices, no tips
    return Loop(train, report=lambda: callback.report().to_dict())


def lightning_precision(policy: Policy, device: torch.device) -> dict[str, Any]:
    """Return the arguments that give a Trainer the dtypes of this policy."""
    for name in ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"):
        if policy == Policy.parse(name):
            break
    else:
        raise ValueError(f"Lightning has no precision for the policy {policy}")
    if name == "16-mixed" and device.type == "cpu":
        from lightning.pytorch.plugins.precision import MixedPrecision

        return {"plugins": [MixedPrecision("16-mixed", "cpu", TorchScaler("cpu"))]}
    return {"precision": name}


# ------------------------------------------------------------------------------------------------------------ the table


def _scan(compile: str | None = None) -> Variant:
    called = "graphed_step" if compile is None else f'graphed_step(compile="{compile}")'
    return Variant(
        f"{called}, scan of {_SCAN}",
        partial(_graphed, compile=compile, scan=True),
        needs_cuda=compile == "max",
        default=False,
        compiles=compile is not None,
        together=_SCAN,
    )


_compiled = partial(Variant, compiles=True)
_if_asked = partial(_compiled, needs_cuda=True, default=False)  # measured only if `--variants` names them

VARIANTS: dict[str, Variant] = {
    "float32": Variant(
        "float32 with TF32, eager",
        lambda case, setting: torch_amp(case, setting._replace(policy=Policy())),
        on_cpu="float32, eager",
    ),
    "amp": Variant("torch AMP, eager", torch_amp, quick=True),
    "amp-fused": Variant("torch AMP, fused optimizer", partial(torch_amp, fused=True), quick=True),
    "compile": _compiled("torch.compile", partial(torch_amp, fused=True, mode="default")),
    "reduce-overhead": _compiled(
        "torch.compile reduce-overhead", partial(torch_amp, fused=True, mode="reduce-overhead"), needs_cuda=True
    ),
    "max-autotune": _if_asked("torch.compile max-autotune", partial(torch_amp, fused=True, mode="max-autotune")),
    "bare": Variant("bare capture (*)", _bare, whole=False, needs_cuda=True, quick=True),
    "bare-compile": _if_asked("bare capture, compiled (*)", partial(_bare, compiled=True), whole=False),
    "graphed": Variant("graphed_step", _graphed, quick=True, on_cpu="graphed_step, emulated"),
    "graphed-compile": _compiled(
        "graphed_step + torch.compile",
        partial(_graphed, compiled=True),
        on_cpu="graphed_step + torch.compile, emulated",
    ),
    "graphed-default": _compiled(
        'graphed_step(compile="default")',
        partial(_graphed, compile="default"),
        on_cpu='graphed_step(compile="default"), emulated',
    ),
    "graphed-max": _if_asked('graphed_step(compile="max")', partial(_graphed, compile="max")),
    "scan": _scan(),
    "scan-default": _scan("default"),
    "scan-max": _scan("max"),
    "lightning": Variant("Lightning, AmpkitCallback", _lightning, on_cpu="Lightning, AmpkitCallback, emulated"),
}
