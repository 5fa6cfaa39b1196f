"""Training by single calls, by scans or by windows: a model and its step, stacks of batches, schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import boosted_loss, make_net, training_state
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

import ampkit

Engine = tuple[str, str]


class Run:
    """A model that is trained by single calls, scans or windows, the same each time it is made."""

    def __init__(
        self,
        engine: Engine,
        graph: str | None = None,
        *,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        average: bool = False,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        **options: Any,
    ) -> None:
        self.device = engine[0]
        self.model = make_net(self.device)
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average else None
        self.step = ampkit.graphed_step(
            options.pop("loss_fn", boosted_loss),
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            after_step=None if self.averaged is None else self.averaged.update_parameters,
            **{"policy": "float32", "on_failure": "raise", "graph": graph or engine[1], **options},
        )
        torch.manual_seed(5)
        self.last_launches = 0  # by the last call, for tests that count

    def state(self) -> dict[str, Any]:
        """Return all that the calls change, by name, in memory of its own."""
        state = training_state(self.model, self.optimizer, self.step.scaler)
        if self.averaged is not None:
            state |= {f"average: {name}": tensor for name, tensor in self.averaged.state_dict().items()}
        if self.scheduler is not None:
            state["epoch"] = getattr(self.scheduler, "last_epoch", None)
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    @property
    def launches(self) -> int:
        """How many graphs were launched."""
        return self.step.replays + self.step.report().launches


def stack(batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*batches, strict=True)]


def of_singles(outs: Sequence[ampkit.StepOutput]) -> ampkit.StepOutput:
    """Return what scan must return for calls that returned these."""
    norms = [out.grad_norm for out in outs if out.grad_norm is not None]
    flat = [pytree.tree_flatten(out.aux) for out in outs]
    aux = [None if leaves[0] is None else torch.stack(leaves) for leaves in zip(*(one for one, _ in flat), strict=True)]
    return ampkit.StepOutput(
        torch.stack([out.loss for out in outs]),
        pytree.tree_unflatten(aux, flat[0][1]),
        torch.stack(norms) if norms else None,
        torch.stack([out.skipped for out in outs]),
        tuple(out.stepped for out in outs),
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200, cycle_momentum=False),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [7]
    ),
}


class Momentum(lr_scheduler.LRScheduler):
    """Sets a rate in each step, and another momentum from its 23rd step on and from its 31st on."""

    def get_lr(self) -> list[float]:
        if self.last_epoch in (23, 31):
            for group in self.optimizer.param_groups:
                group["momentum"] -= 0.125
        return [0.05 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


class Blend:
    """A scheduler of the user's own, which writes to a buffer of the model."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model

    def step(self) -> None:
        self._model.norm.bias.data.mul_(0.5)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)


class _Eager(torch.optim.SGD):
    """Reads a number on the host."""

    def step(self, closure: Any = None) -> Any:
        torch.stack([param.sum() for group in self.param_groups for param in group["params"]]).sum().item()
        return super().step(closure)


def steps_eagerly(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer that no graph can hold, and that has a hook."""
    made = _Eager(params, lr=0.05)
    made.register_step_post_hook(lambda *_: None)
    return made


def two_rates(device: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes an optimizer of two groups. The rate of the first is a tensor on this device."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        groups = [{"params": [first], "lr": torch.tensor(0.01, device=device)}, {"params": others, "lr": 0.02}]
        return torch.optim.AdamW(groups, fused=True)

    return optimizer


def with_constants(model: nn.Module, batch: dict[str, Any], weight: Tensor, twice: bool) -> Any:
    """Return a loss of inputs of which some are no tensors, and an aux with a None."""
    loss, aux = boosted_loss(model, *batch["data"], weight)
    return (2 * loss if twice else loss), {**aux, "none": None}


def writes_to_its_batch(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Any:
    boost.mul_(2.0)
    return boosted_loss(model, images, labels, boost)
