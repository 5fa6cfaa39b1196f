"""Every optimizer of torch, timm and transformers has the bits of eager steps, in the graph or behind it.

timm and transformers are no requirements of the tests: where they are not installed, theirs are skipped.
"""

import importlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic, make_net
from test_parts import batch, loss_fn
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

CALLS = 26  # the last change is in the tenth; on CUDA, modules around adopt's update are captured ten calls later
# LBFGS needs a closure (tests/step/test_wrong_use.py), SparseAdam sparse gradients.
OTHER = ("Optimizer", "LBFGS", "SparseAdam")
CLASSES = {name: cls for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and name not in OTHER}
TORCH = [name for name, cls in CLASSES.items() if issubclass(cls, torch.optim.Optimizer)]
# Kernels of bitsandbytes and apex; backward with create_graph=True.
NOT_ALONE = ("bnb", "fused", "adahessian")
QUICK = ("lamb", "lion", "kron", "madgrad", "adopt")


def timm_names() -> list[Any]:
    if importlib.util.find_spec("timm") is None:
        return []
    names = importlib.import_module("timm.optim").list_optimizers()
    alone = [name for name in names if not name.startswith(NOT_ALONE)]
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in alone]


def trained(engine: Engine, make: Make) -> tuple[list[Any], ampkit.GraphedStep]:
    """Return parameters and outputs of each step, of which two overflow; the rate changes twice, the decay once."""
    model = make_net(engine[0])
    matrices = [param for param in model.parameters() if param.dim() == 2]  # Muon takes no others
    optimizer = make(matrices)
    torch.manual_seed(5)
    scaler = ampkit.GradScaler(engine[0], init_scale=256.0)
    options: dict[str, Any] = {"policy": "float16", "scaler": scaler, "max_norm": 0.5, "graph": engine[1]}
    step = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    history: list[list[Tensor]] = []
    for i in range(CALLS):
        if i in (6, 9):
            for group in optimizer.param_groups:
                group["lr"] = None if group["lr"] is None else group["lr"] * 0.5
        if i == 8:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.25
        out = step(*batch(engine[0], i, math.inf if i in (1, 7) else 1.0))
        assert bool(out.skipped) == (i in (1, 7))
        history.append([*map(bits, model.parameters()), out.loss.cpu(), out.grad_norm.cpu()])
    return history, step


def check(engine: Engine, make: Make) -> None:
    with warnings.catch_warnings(), deterministic():
        warnings.simplefilter("ignore")
        expected, _ = trained((engine[0], "off"), make)
        found, step = trained(engine, make)
    assert_same(expected, found)
    report = step.report()
    # On CUDA adopt reads its count in each step, as a part of the graphs. Then modules are captured one by one.
    assert report.replays + report.in_parts > 0, report
    # On a CPU a step does not set `capturable`, and code that is not torch's then computes with its count of steps.
    groups = make([nn.Parameter(torch.ones(2, 2))]).param_groups
    counts = engine[0] == "cpu" and all("capturable" in group for group in groups)
    assert report.outcome in ("whole", "in parts", *["eager"] * counts), report


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.sampled(8)
def test_optimizers_of_torch(engine: Engine, name: str) -> None:
    """R5: rate and weight decay are those of each step, a skipped step leaves nothing, and forward is captured."""
    check(engine, getattr(torch.optim, name))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", timm_names())
def test_optimizers_of_timm(engine: Engine, name: str) -> None:
    """R5: the same for code that is not torch's, whatever it keeps on the host."""
    optimizers = importlib.import_module("timm.optim")

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizers.create_optimizer_v2(list(params), opt=name, lr=2**-7)  # type: ignore[no-any-return]

    check(engine, make)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("relative", [True, False])
def test_adafactor_of_transformers(engine: Engine, relative: bool) -> None:
    """R5: the same with a rate that is computed on the host from a step count."""
    optimization = pytest.importorskip("transformers.optimization")
    options = {} if relative else {"lr": 2**-7, "relative_step": False, "scale_parameter": False}
    check(engine, lambda params: optimization.Adafactor(params, **options))


class Wrapped(torch.optim.Optimizer):
    """As published wrappers are: all that it has is another optimizer's, and it does not call `super().__init__()`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_optimizer_without_tables_of_hooks(engine: Engine) -> None:
    """R5: it trains as torch's loop lets it, with the bits of eager steps."""
    check(engine, lambda params: Wrapped(torch.optim.AdamW(params, lr=0.1)))
