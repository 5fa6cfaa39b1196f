"""Skipping with every optimizer: bits after a skipped step, agreement with torch, no host read, unusual gradients."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import DEVICES, assert_same, no_sync, scaled_backward
from torch import Tensor, nn

import ampkit

Make = Callable[[Any, bool], torch.optim.Optimizer]


def plain(name: str, **options: Any) -> Make:
    """Return a function that makes an optimizer without a fused kernel; on CUDA with `capturable` if torch has it."""
    cls = getattr(torch.optim, name)

    def make(params: Any, on_cuda: bool) -> torch.optim.Optimizer:
        flag = {"capturable": True} if on_cuda and "capturable" in inspect.signature(cls).parameters else {}
        return cls(params, **{"lr": 0.01, **options, **flag})  # type: ignore[no-any-return]

    return make


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": plain("Adadelta", weight_decay=0.01),
    "Adam": plain("Adam", amsgrad=True),
    "AdamW": plain("AdamW", weight_decay=0.1),
    "Adamax": plain("Adamax"),
    "ASGD": plain("ASGD", weight_decay=0.01),
    "NAdam": plain("NAdam"),
    "RAdam": plain("RAdam"),
    "RMSprop": plain("RMSprop", momentum=0.9, centered=True),
    "Rprop": plain("Rprop"),
    "SGD": plain("SGD", momentum=0.9, weight_decay=0.01),
    "SGD for loop": plain("SGD", momentum=0.9, foreach=False),
    "fused Adam": plain("Adam", fused=True),
    "fused AdamW": plain("AdamW", fused=True),
    "fused SGD": plain("SGD", momentum=0.9, nesterov=True, fused=True),
}


def make(name: str, device: str) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(6, 3).to(device)
    return model, OPTIMIZERS[name](model.parameters(), device == "cuda")


def initialised(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer without entries that are still empty."""
    return {"state": {i: s for i, s in optimizer.state_dict()["state"].items() if s}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_agrees_with_torch(device: str, name: str, max_norm: float | None) -> None:
    """S1: over 12 steps with overflows, parameters are within 1e-6 of torch's, and the scale is equal."""
    results = []
    for cls in (ampkit.GradScaler, torch.amp.GradScaler):
        model, optimizer = make(name, device)
        scaler = cls(device, init_scale=1024.0, growth_interval=3)
        for i in range(12):
            scaled_backward(model, scaler, i, math.inf if i in (2, 7) else None)
            if isinstance(scaler, ampkit.GradScaler):
                scaler.step(optimizer, max_norm=max_norm)
            else:
                scaler.unscale_(optimizer)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
            scaler.update()
        results.append((model.state_dict(), scaler.get_scale()))
    (ours, our_scale), (theirs, their_scale) = results
    for key in ours:
        error = (ours[key] - theirs[key]).abs().max() / theirs[key].abs().max()
        assert error <= 1e-6, f"{key}: {error}"
    assert our_scale == their_scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_skipped_step_leaves_every_bit(device: str, name: str, bad: float) -> None:
    """S1: parameters, moments, step counts and step sizes have the bits from before the step."""
    model, optimizer = make(name, device)
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    for i in range(2):
        scaled_backward(model, scaler, i)
        scaler.step(optimizer)
        scaler.update()
    before = copy.deepcopy((model.state_dict(), initialised(optimizer)))
    scaled_backward(model, scaler, 2, bad)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert_same(before, (model.state_dict(), initialised(optimizer)))
    assert scaler.stats()[:3] == (3, 1, 4.0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_fifty_steps_without_a_host_read(name: str, bad: float | None) -> None:
    """S1: scale, step with max_norm, and update never wait for the device, in the first step and on overflow too."""
    model, optimizer = make(name, "cuda")
    if name == "ASGD":  # torch itself copies the learning rate from the host where it makes ASGD's state
        model(torch.zeros(1, 6, device="cuda")).sum().backward()
        optimizer.step()
        model.zero_grad()
    scaler = ampkit.GradScaler("cuda", hysteresis=2, min_scale=2.0**-30)
    x = torch.randn(5, 6, device="cuda")
    infinite = torch.full_like(model.weight, math.inf)
    scaler.materialize(torch.device("cuda"))
    with no_sync():
        for _ in range(50):
            scaler.scale(model(x).square().mean()).backward()
            if bad is not None:
                assert model.weight.grad is not None
                model.weight.grad.copy_(infinite)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            model.zero_grad()
    assert scaler.stats()[:2] == (50, 50 if bad else 0)


@pytest.mark.cuda
def test_others_warn_once_on_cuda() -> None:
    """With a step count on the host, each step reads found_inf. One warning says so, and what to write."""
    model = nn.Linear(6, 3).cuda()
    optimizer = torch.optim.RMSprop(model.parameters())
    scaler = ampkit.GradScaler("cuda", init_scale=8.0)
    scaled_backward(model, scaler, 0)
    with pytest.warns(ampkit.AmpkitWarning, match=r"every step waits for it. Write RMSprop\(..., capturable=True\)"):
        scaler.step(optimizer)
    scaler.update()
    scaled_backward(model, scaler, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_norm_type(device: str, norm_type: float, fused: bool) -> None:
    """Clipping takes the same norms as torch, and each of them finds gradients that are not finite."""
    ours, theirs = (torch.zeros(5, device=device, requires_grad=True) for _ in range(2))
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.0, 0.5], device=device)
    optimizer = torch.optim.SGD([ours], lr=1.0, fused=fused)
    scaler = ampkit.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.zeros((), device=device))
    ours.grad, theirs.grad = gradient * 4.0, gradient.clone()
    scaler.step(optimizer, max_norm=0.5, norm_type=norm_type)
    scaler.update()
    norm = nn.utils.clip_grad_norm_([theirs], 0.5, norm_type)
    torch.testing.assert_close(scaler.grad_norm, norm)
    torch.testing.assert_close(ours.detach(), -theirs.grad)
    ours.grad = gradient / 0
    before = ours.detach().clone()
    scaler.step(optimizer, norm_type=norm_type)
    assert torch.equal(before, ours)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_norm_type_must_be_positive(value: float) -> None:
    """The 0-norm counts elements, so it does not tell whether they are finite."""
    _, optimizer = make("SGD", "cpu")
    with pytest.raises(ValueError, match=r"GradScaler.step\(norm_type=.*must be a number > 0, or inf"):
        ampkit.GradScaler("cpu").step(optimizer, norm_type=value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False])
def test_s5_empty_and_missing_gradients(device: str, fused: bool) -> None:
    """S5: with an empty parameter and one without gradient, the step still works and finds an overflow."""
    used, empty, unused = (torch.ones(n, device=device, requires_grad=True) for n in (3, 0, 2))
    optimizer = torch.optim.SGD([used, empty, unused], lr=1.0, momentum=0.9, fused=fused)
    scaler = ampkit.GradScaler(device, init_scale=4.0)
    for bad in (None, math.inf):
        scaler.scale(used.sum() + empty.sum()).backward()
        if bad is not None:
            assert used.grad is not None
            used.grad[0] = bad
        before = used.detach().clone()
        scaler.step(optimizer, max_norm=10.0)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, used) == (bad is not None)
    assert torch.equal(unused, torch.ones_like(unused))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_s5_sparse_gradients(device: str, bad: float | None) -> None:
    """S5: with sparse gradients SparseAdam steps and skips as under torch's scaler."""
    embedding = nn.Embedding(5, 2, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    scaler = ampkit.GradScaler(device, init_scale=4.0)
    before = embedding.weight.detach().clone()
    loss = embedding(torch.tensor([1, 3], device=device)).sum()
    scaler.scale(loss * (bad or 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, embedding.weight) == (bad is not None)
    assert scaler.stats()[:2] == (1, int(bad is not None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_s8_gradient_dtypes(device: str, dtype: torch.dtype, name: str) -> None:
    """S8: float16, bfloat16 and complex gradients are unscaled, clipped and skipped."""
    weight = torch.ones(4, dtype=dtype, device=device, requires_grad=True)
    optimizer = OPTIMIZERS[name]([weight], device == "cuda")
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    for bad in (None, math.inf):
        loss: Tensor = (weight * 1000.0).abs().sum()
        scaler.scale(loss).backward()
        if bad is not None:
            assert weight.grad is not None
            weight.grad[0] = bad
        before = weight.detach().clone()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, weight) == (bad is not None)
    assert weight.isfinite().all()
    assert scaler.stats()[:2] == (2, 1)


RATED = [torch.optim.Rprop, torch.optim.ASGD, torch.optim.RAdam]


@pytest.mark.parametrize("kind", RATED, ids=lambda kind: kind.__name__)
def test_state_that_begins_with_a_rate_begins_with_that_of_a_real_step(kind: type[torch.optim.Optimizer]) -> None:
    """A first step that is skipped leaves no state with the rate that it had, as torch's scaler leaves none."""

    def train(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        for i in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (i + 1)
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).square().mean() * (math.inf if i == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach() for param in model.parameters()]

    options = {"init_scale": 2.0**10, "growth_interval": 100}
    assert_same(train(ampkit.GradScaler("cpu", **options)), train(torch.amp.GradScaler("cpu", **options)))
