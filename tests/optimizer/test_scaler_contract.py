"""GradScaler.step accepts what torch's accepts: float64, arguments, optimizers with amp support, hooks, no gradient."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import DEVICES, scaled_backward
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ampkit

Make = Callable[[Any], torch.optim.Optimizer]
BOTH: list[Any] = [ampkit.GradScaler, torch.amp.GradScaler]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}
on_the_host = pytest.mark.filterwarnings("ignore:GradScaler.step:ampkit.AmpkitWarning")  # which is said on CUDA


def unscaled_step(scaler: Any, optimizer: torch.optim.Optimizer, params: list[Tensor], max_norm: float | None) -> None:
    """Unscale, clip and step, with the arguments of `step` or with torch's functions."""
    if isinstance(scaler, ampkit.GradScaler):
        scaler.step(optimizer, max_norm=max_norm)
    else:
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        scaler.step(optimizer)
    scaler.update()


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("others", [(), (torch.float32,)])
def test_float64_gradients(device: str, name: str, max_norm: float | None, others: tuple[torch.dtype, ...]) -> None:
    """S8: steps with float64 gradients, alone or among others, compute in float64 as torch's, and are skipped."""
    results = []
    for cls in BOTH:
        made = torch.Generator().manual_seed(0)
        dtypes = (torch.float64, *others)
        params = [torch.randn(4, dtype=torch.float64, generator=made).to(device, dtype) for dtype in dtypes]
        optimizer = OPTIMIZERS[name]([param.requires_grad_() for param in params])
        scaler = cls(device, init_scale=8.0)
        for i in range(4):
            scaler.scale(torch.zeros((), device=device))
            for param in params:
                gradient = torch.randn(4, dtype=torch.float64, generator=made) * 8.0
                param.grad = gradient.to(device, param.dtype)
            if i == 2:
                assert params[0].grad is not None
                params[0].grad[1] = math.inf
            before = params[0].detach().clone()
            unscaled_step(scaler, optimizer, params, max_norm)
            assert torch.equal(before, params[0]) == (i == 2)
        results.append(params[0].detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128])
def test_a_norm_over_float64_and_less(device: str, dtype: torch.dtype) -> None:
    """S8: gradients in float64 and in 16 bits, or complex ones, have one norm, which is computed in float64."""
    params = [torch.ones(4, dtype=kind, device=device, requires_grad=True) for kind in (torch.float64, dtype)]
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    scaler.step(torch.optim.SGD(params, lr=1.0), max_norm=1.0)
    assert scaler.grad_norm is not None
    assert scaler.grad_norm.dtype is torch.float64
    assert scaler.grad_norm.item() == math.sqrt(8.0)
    assert params[0].detach()[0].item() == pytest.approx(1 - 1 / math.sqrt(8.0), rel=1e-6)  # of the clip's 1e-6
    torch.testing.assert_close(params[1].detach().real.double(), params[0].detach(), atol=4e-3, rtol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fused sgd", "fused adamw"])
def test_float64_in_a_graphed_step(device: str, name: str) -> None:
    """S8: without a scaler, a step of a float64 model clips, captured or not."""
    states = []
    for graph in ("off", "auto" if device == "cuda" else "emulate"):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(device, torch.float64)
        optimizer = OPTIMIZERS[name](model.parameters())
        step = ampkit.graphed_step(
            lambda model, x: model(x).square().mean(), model, optimizer, max_norm=0.05, graph=graph, on_failure="raise"
        )
        for i in range(6):
            made = torch.Generator().manual_seed(i)
            out = step(torch.randn(5, 6, dtype=torch.float64, generator=made).to(device))
        assert out.grad_norm is not None
        assert out.grad_norm.dtype is torch.float64
        states.append(model.weight.detach().clone())
    assert torch.equal(*states)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sgd", "fused sgd", "fused adamw"])
def test_float64_as_the_default_dtype(device: str, name: str) -> None:
    """S8: the scaler passes float32 tensors to kernels, whatever the default dtype is."""
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(6, 3).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = ampkit.GradScaler(device, init_scale=8.0)
        for i, bad in enumerate([None, math.inf, None]):
            scaled_backward(model, scaler, i, bad)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.stats()[:3] == (3, 1, 4.0)
    assert model.weight.isfinite().all()


class Scalable(torch.optim.Optimizer):
    """Plain gradient descent whose step takes an argument."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, factor: float = 1.0, *, twice: bool = False) -> float:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * (group["lr"] * factor * (1 + twice)))
        return factor


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cls", BOTH)
def test_arguments_go_to_the_optimizer(device: str, enabled: bool, cls: Any) -> None:
    """S1: positional and keyword arguments reach `optimizer.step`, and its result is returned."""
    model = nn.Linear(6, 3).to(device)
    scaler = cls(device, init_scale=8.0, enabled=enabled)
    scaled_backward(model, scaler, 0)
    before = model.weight.detach().clone()
    assert model.weight.grad is not None
    gradient = model.weight.grad / (8.0 if enabled else 1.0)
    assert scaler.step(Scalable(model.parameters()), 0.5, twice=True) == 0.5
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)
    scaler.update()
    scaled_backward(model, scaler, 1)
    assert scaler.step(OPTIMIZERS["sgd"](model.parameters()), None) is None  # no closure


def test_a_positional_closure_is_refused() -> None:
    """S5: a closure is refused, because it would compute gradients that are never unscaled."""
    model = nn.Linear(6, 3)
    scaler = ampkit.GradScaler("cpu")
    scaled_backward(model, scaler, 0)
    with pytest.raises(RuntimeError, match="a closure cannot be used"):
        scaler.step(OPTIMIZERS["sgd"](model.parameters()), lambda: 0.0)


class TakesScaler(Scalable):
    """Amp support of the first kind: `step` takes the scaler."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler: Any = None) -> float:  # type: ignore[override]
        assert isinstance(grad_scaler, torch.amp.GradScaler)
        assert not hasattr(self, "grad_scale")
        return grad_scaler.get_scale()


class TakesTensors(Scalable):
    """Amp support of the second kind: the optimizer reads grad_scale and found_inf from its attributes."""

    _step_supports_amp_scaling = True

    def step(self) -> float:  # type: ignore[override]
        assert isinstance(self.grad_scale, Tensor)  # type: ignore[attr-defined]
        assert isinstance(self.found_inf, Tensor)  # type: ignore[attr-defined]
        return float(self.found_inf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_amp_support_of_other_makers(device: str, cls: Any, bad: float | None) -> None:
    """S4: an optimizer with amp support of the first kind and one with the second kind share a scale."""
    model = nn.Linear(6, 3).to(device)
    scaler = cls(device, init_scale=8.0)
    scaled_backward(model, scaler, 0, bad)
    first, second = TakesScaler(model.parameters()), TakesTensors(model.parameters())
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        assert scaler.step(first) == 8.0
    assert scaler.step(second) == (0.0 if bad is None else 1.0)
    scaler.update()
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["fused sgd", "fused adamw"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_a_fused_optimizer_without_gradients(device: str, cls: Any, first: bool, kind: str, bad: float | None) -> None:
    """S5: if another optimizer has gradients, one without them steps and changes nothing. So does a param group."""
    used, unused, alone = (torch.ones(3, device=device, requires_grad=True) for _ in range(3))
    optimizers = [OPTIMIZERS[kind]([{"params": [used]}, {"params": [unused]}]), OPTIMIZERS[kind]([alone])]
    scaler = cls(device, init_scale=8.0)
    scaler.scale(used.sum() * (bad or 1.0)).backward()
    for optimizer in optimizers if first else reversed(optimizers):
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(unused, torch.ones_like(unused))
    assert torch.equal(alone, torch.ones_like(alone))
    assert torch.equal(used, torch.ones_like(used)) == (bad is not None)
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)


@contextmanager
def counting(optimizer: torch.optim.Optimizer, where: str) -> Iterator[list[str]]:
    """Context in which each call of a step hook appends to the list."""
    called: list[str] = []
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "pre of all": register_optimizer_step_pre_hook,
        "post of all": register_optimizer_step_post_hook,
    }[where]
    handle = register(lambda *_: called.append(where))
    try:
        yield called
    finally:
        handle.remove()


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("where", ["pre", "post", "pre of all", "post of all"])
def test_step_hooks_run_when_torchs_do(device: str, name: str, where: str) -> None:
    """S1: in a skipped step hooks run if torch calls `optimizer.step` there too, and otherwise do not."""
    calls = []
    for cls in BOTH:
        model = nn.Linear(6, 3).to(device)
        optimizer, scaler = OPTIMIZERS[name](model.parameters()), cls(device, init_scale=8.0)
        with counting(optimizer, where) as called:
            for i, bad in enumerate([None, math.inf, math.nan, None]):
                scaled_backward(model, scaler, i, bad)
                scaler.step(optimizer)
                scaler.update()
        calls.append(called)
    assert calls[0] == calls[1]
    assert len(calls[0]) == (4 if "fused" in name else 2)


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "fused subclass"])
def test_a_replaced_step_runs_when_torchs_does(device: str, name: str) -> None:
    """S1: in a skipped step, a step that was replaced on the object is called only if torch calls it there too."""
    calls = []
    for cls in BOTH:
        model = nn.Linear(6, 3).to(device)
        make = OPTIMIZERS.get(name, lambda params: FusedSubclass(params, lr=0.1, fused=True))
        optimizer, scaler = make(model.parameters()), cls(device, init_scale=8.0)
        called: list[int] = []
        original = optimizer.step

        def replaced(*args: Any, original: Any = original, called: list[int] = called) -> Any:
            called.append(1)
            return original(*args)

        optimizer.step = replaced  # type: ignore[method-assign]
        for i, bad in enumerate([None, None, None, math.inf, math.nan, None]):
            scaled_backward(model, scaler, i, bad)
            before = model.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.weight) == (bad is not None)
        calls.append(len(called))
    assert calls == ([6, 6] if "fused" in name else [4, 4])


class FusedSubclass(torch.optim.SGD):
    """Has a step of its own, which calls the fused kernel."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.cuda
def test_a_step_with_hooks_says_that_it_waits() -> None:
    """S1: because of hooks each step waits for the device. One warning says so, and what to write."""
    model = nn.Linear(6, 3).cuda()
    optimizer, scaler = OPTIMIZERS["sgd"](model.parameters()), ampkit.GradScaler("cuda", init_scale=8.0)
    with counting(optimizer, "pre"):
        scaled_backward(model, scaler, 0)
        with pytest.warns(ampkit.AmpkitWarning, match="SGD has step hooks, which must not run in a skipped step"):
            scaler.step(optimizer)
        scaler.update()
        scaled_backward(model, scaler, 1)
        scaler.step(optimizer)
