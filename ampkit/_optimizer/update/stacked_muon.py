"""The step of torch.optim.Muon with matrices of equal shape stacked: a product of all of them where torch has many.

torch steps one matrix after the other. Its 15 products per matrix are too small to fill a GPU. Products of stacks do
the same arithmetic with as many kernels for twelve layers as for one. The rate is read from a tensor, so that a graph
can hold the step from the beginning, under any schedule.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from ..._torch.compile import Compiler
from ..._torch.optimizers import init_optimizer_state, note_step
from ..step_kind import parameters, runs_beside_step, torch_class

_MOST_ELEMENTS = 2**27  # in a stack, which is 256 MiB in bfloat16; what a product makes takes as much again
_MOST_VARIANTS = 8  # sets of hyperparameters for one layout; each of them is compiled by itself
_MOST_STEPS = 99  # of Newton and Schulz, as in torch
# On a CPU a step took as long compiled as not, and compiling it took longer than many steps.
_GAINS_ON = ("cuda",)


@dataclass(eq=False)
class StackedMuon:
    """Steps a Muon. State and hyperparameters are those of torch.

    What comes in front of the products and behind them is compiled, once for all matrices of a shape. The products are
    left to torch. One function of all matrices of a shape would have many more kernels to compile.

    Attributes:
        problem: why nothing more is compiled; "" if it may be.
        used: whether a step was done by compiled code.
    """

    _optimizer: Optimizer
    _compiler: Compiler
    _compiling: Callable[[], AbstractContextManager[None]]  # returns a context for a compilation
    _failed: Callable[[Exception], str]  # says that a compilation has failed, and returns why
    _compiled: dict[Hashable, dict[Hashable, Callable[..., Any]]] = field(default_factory=dict)
    _ready: set[Callable[..., Any]] = field(default_factory=set)  # what was compiled
    _shapes: set[torch.Size] = field(default_factory=set)
    problem: str = ""
    used: bool = False

    def __post_init__(self) -> None:
        kind = parameters(self._optimizer)[0].device.type
        self.problem = self.problem or ("" if kind in _GAINS_ON else f"that gains nothing on a {kind.upper()}")

    def text(self) -> str:
        """Return in words what is compiled."""
        return f"{type(self._optimizer).__name__}, matrices of {len(self._shapes)} shape(s) stacked"

    def step(self) -> None:
        """Step all matrices that have a gradient. Sync: none.

        Raises:
            ValueError: a group has hyperparameters that torch refuses.
            RuntimeError: a gradient is sparse.
        """
        init_optimizer_state(self._optimizer)
        note_step(self._optimizer)
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
                for param in group["params"]:
                    if param.grad is not None:
                        alike[param.shape].append(param)
                for shape, params in alike.items():
                    most = max(1, _MOST_ELEMENTS // max(1, shape.numel()))
                    for start in range(0, len(params), most):
                        self._step_alike(group, params[start : start + most])
                self._shapes.update(alike)

    def _step_alike(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        first, rate = params[0], group["lr"]
        if not isinstance(rate, Tensor):
            rate = torch.full(
                (), rate, dtype=torch.float64 if first.device.type == "cpu" else None, device=first.device
            )
        coefficients, steps = tuple(group["ns_coefficients"]), group["ns_steps"]
        if len(coefficients) != 3 or steps > _MOST_STEPS:
            raise ValueError(
                f"Muon(ns_coefficients={coefficients}, ns_steps={steps}): expected three coefficients, and at most "
                f"{_MOST_STEPS} steps."
            )
        numbers: tuple[Any, ...] = group["momentum"], group["nesterov"]
        momenta = [self._optimizer.state[param]["momentum_buffer"] for param in params]
        directions = [
            self._call(direction_of, numbers, each.grad, own) for each, own in zip(params, momenta, strict=True)
        ]
        orthogonal = orthogonalized(torch.stack(directions), coefficients, steps, group["eps"])
        numbers = group["weight_decay"], _ratio(group["adjust_lr_fn"], *first.shape)
        for param, direction in zip(params, orthogonal.unbind(), strict=True):
            self._call(move, numbers, param.detach(), direction, rate.reshape(1))

    def _call(self, function: Callable[..., Any], numbers: tuple[Any, ...], *tensors: Any) -> Any:
        layout = function, *((t.shape, t.stride(), t.dtype) for t in tensors)
        variants = self._compiled.setdefault(layout, {})
        if numbers not in variants and len(variants) < _MOST_VARIANTS and not self.problem:
            variants[numbers] = self._compiler.compiled(function, whole=True)
        if numbers in variants and not self.problem:
            compiled = variants[numbers]
            try:
                with nullcontext() if compiled in self._ready else self._compiling():
                    made = compiled(*numbers, *tensors)
            except Exception as error:  # the whole function is compiled before it runs, so nothing has changed
                self.problem = self._failed(error)
            else:
                self._ready.add(compiled)
                self.used = True
                return made
        return function(*numbers, *tensors)


def direction_of(factor: float, nesterov: bool, grad: Tensor, momentum: Tensor) -> Tensor:
    """Move the momentum, and return in bfloat16 what is to be orthogonalized, as torch/optim/_muon.py does."""
    momentum.lerp_(grad, 1 - factor)
    return (grad.lerp(momentum, factor) if nesterov else momentum).bfloat16()


def move(weight_decay: float, ratio: float, param: Tensor, direction: Tensor, rate: Tensor) -> None:
    """Move a matrix against its direction. `rate` has the shape (1,), and is multiplied by `ratio`."""
    wide = torch.float64 if param.dtype is torch.float64 else torch.float32
    rate = rate.reshape(()).to(wide)
    param.mul_(1 - rate * weight_decay).add_(direction.to(wide) * (-rate * ratio))


def _ratio(adjust: str | None, rows: int, columns: int) -> float:
    """Return what the rate is multiplied by, as `_adjust_lr` of torch/optim/_muon.py does."""
    if adjust is None or adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def orthogonalized(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the zeroth powers of matrices (count, rows, columns) in bfloat16, by iterations of Newton and Schulz.

    K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (kellerjordan.github.io/posts/muon).
    """
    a, b, c = coefficients
    is_tall = stack.shape[1] > stack.shape[2]
    if is_tall:
        stack = stack.mT
    stack = stack / stack.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = stack @ stack.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        stack = torch.baddbmm(stack, gram, stack, beta=a)
    return stack.mT if is_tall else stack


def can_stack(optimizer: Optimizer) -> bool:
    """Return whether `StackedMuon` can step this optimizer."""
    if torch_class(optimizer) is not Muon or runs_beside_step(optimizer):
        return False
    # torch 2.11 then orthogonalizes in the memory of the momentum itself, which is normalized by that.
    overwrites = any(
        param.dtype is torch.bfloat16 and not group["nesterov"]
        for group in optimizer.param_groups
        for param in group["params"]
    )
    return not overwrites and len({param.device for param in parameters(optimizer)}) == 1
