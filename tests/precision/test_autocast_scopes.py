"""Where autocast begins and ends: nesting, its weight cache, optimizer steps, checkpointing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from autocast_samples import LOW
from harness import DEVICES, ENGINES, assert_same, bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampkit


class Casts(TorchDispatchMode):
    """Counts the casts below autocast, and notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0
        self.products: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += func is torch.ops.aten._to_copy.default
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.products.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def make_linear(device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    return nn.Linear(8, 8).to(device), torch.randn(4, 8).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
def test_disabled_inside(device, low):
    """A8: enabled=False nested inside is off, and on again behind it; float32 results are those without autocast."""
    linear, x = make_linear(device)
    want = linear(x)
    with torch.autocast(device, dtype=low):
        assert linear(x).dtype is low
        with torch.autocast(device, enabled=False):
            assert torch.equal(linear(x), want)
            with torch.autocast(device, dtype=low):
                assert linear(x).dtype is low
            assert linear(x).dtype is torch.float32
        assert linear(x).dtype is low
    assert torch.equal(linear(x), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outer", LOW)
def test_two_dtypes_nested(device, outer):
    """A8: an autocast of another dtype nested inside holds for its operations, and not behind it."""
    inner = LOW[1 - LOW.index(outer)]
    _, x = make_linear(device)
    with torch.autocast(device, dtype=outer):
        assert (x @ x.T).dtype is outer
        with torch.autocast(device, dtype=inner):
            assert torch.equal(x @ x.T, (x.to(inner) @ x.T.to(inner)))
        y = x @ x.T
        assert y.dtype is outer
        assert torch.equal(y, x.to(outer) @ x.T.to(outer))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", [False, True])
def test_two_dtypes_nested_on_one_weight(device, cache):
    """A8: on one weight this needs cache_enabled=False: torch's cache does not know the dtype, and raises."""
    linear, x = make_linear(device)
    with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=cache):
        linear(x)
        with torch.autocast(device, dtype=torch.float16, cache_enabled=cache):
            if cache:
                with pytest.raises(RuntimeError, match="dtype"):
                    linear(x)
            else:
                assert linear(x).dtype is torch.float16


@pytest.mark.parametrize("device", DEVICES)
def test_policies_nested(device):
    """A8: the same through policies, one of which switches autocast off."""
    linear, x = make_linear(device)
    other, _ = make_linear(device)
    full, half, brain = (ampkit.Policy.parse(text) for text in ("float32", "float16", "bfloat16"))
    with half.autocast(device):
        assert linear(x).dtype is torch.float16
        with full.autocast(device):
            assert linear(x).dtype is torch.float32
            with brain.autocast(device):
                assert other(x).dtype is torch.bfloat16
        assert linear(x).dtype is torch.float16


@pytest.mark.parametrize("device", DEVICES)
def test_after_an_exception(device):
    """A8: an exception inside leaves autocast as it was."""
    with torch.autocast(device, dtype=torch.bfloat16):
        with pytest.raises(ZeroDivisionError), torch.autocast(device, enabled=False):
            raise ZeroDivisionError
        assert torch.is_autocast_enabled(device)
    assert not torch.is_autocast_enabled(device)


@pytest.mark.parametrize("device", DEVICES)
def test_cache_casts_a_weight_once(device):
    """A8: within one scope a weight is cast once; no_grad changes neither that nor the values."""
    linear, x = make_linear(device)
    with Casts() as seen, torch.autocast(device, dtype=torch.bfloat16):
        first = linear(x)
        casts = seen.casts
        again = [linear(x) for _ in range(3)]
    assert casts == 3, "input, weight, bias"
    assert seen.casts == casts + 3, "the input again, each time"
    assert all(torch.equal(first, other) for other in again)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(linear(x), first)


@pytest.mark.parametrize("device", DEVICES)
def test_cache_under_no_grad(device):
    """A8: what no_grad put into the cache does not cut the gradient of a later call in the same scope."""
    linear, x = make_linear(device)
    grads = []
    for before in (False, True):
        linear.weight.grad = None
        with torch.autocast(device, dtype=torch.bfloat16):
            if before:
                with torch.no_grad():
                    linear(x)
            linear(x).float().sum().backward()
        grads.append(linear.weight.grad)
    assert torch.equal(*grads)


def test_cache_does_not_grow_under_no_grad():
    """A8: repeated calls under no_grad in one scope cast their input only: the cache has one entry a weight."""
    linear, x = make_linear("cpu")
    with Casts() as seen, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)
        before = seen.casts
        for _ in range(5):
            linear(x)
    assert seen.casts - before == 5


@pytest.mark.cuda
def test_memory_does_not_grow_under_no_grad():
    """A8: the same by the bytes that the GPU holds, with the cache and without it."""
    linear, x = make_linear("cuda")
    for cache in (True, False):
        with torch.autocast("cuda", cache_enabled=cache), torch.no_grad():
            out = linear(x)
            before = torch.cuda.memory_allocated()
            for _ in range(5):
                out = linear(x)
            assert torch.cuda.memory_allocated() == before
        del out


# Optimizer steps change weights that the cache may hold.


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make_training(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, fused=True), x


def plain_loop(device: str, steps: int, low: torch.dtype, cache: bool = True) -> tuple[list[Tensor], nn.Module]:
    model, optimizer, x = make_training(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=low, cache_enabled=cache):
            loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model


@pytest.mark.parametrize("device", DEVICES)
def test_no_stale_weight_in_a_plain_loop(device):
    """A8: leaving autocast before the optimizer step is enough: with the cache the same bits as without it."""
    cached, uncached = (plain_loop(device, 6, torch.bfloat16, cache=cache) for cache in (True, False))
    assert_same([bits(loss) for loss in cached[0]], [bits(loss) for loss in uncached[0]])
    assert_same([bits(p) for p in cached[1].parameters()], [bits(p) for p in uncached[1].parameters()])
    assert len({float(loss) for loss in cached[0]}) == 6, "each step sees the weights of the one before"


@pytest.mark.parametrize("device", DEVICES)
def test_stale_weight_when_the_step_is_inside(device):
    """A8: torch itself serves stale weights where the optimizer steps inside autocast. Ours must not (below)."""
    model, optimizer, x = make_training(device)
    losses = []
    with torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_fn(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] == losses[1] == losses[2]


OUTSIDE = ["nothing", "autocast", "autocast and no policy", "autocast switched off"]


def surroundings(name: str, device: str) -> AbstractContextManager[Any]:
    if name == "nothing":
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16, enabled=name != "autocast switched off")


@pytest.mark.parametrize("engine", [("cpu", "off"), *ENGINES])
@pytest.mark.parametrize("outside", OUTSIDE)
def test_no_stale_weight_in_a_step(engine, outside):
    """A8: a step inside somebody's autocast scope trains as one outside it."""
    device, graph = engine
    want, trained = plain_loop(device, 8, torch.bfloat16)
    model, optimizer, x = make_training(device)
    policy = None if outside == "autocast and no policy" else "bfloat16"
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy=policy, graph=graph)
    with surroundings(outside, device):
        losses = [step(x).loss for _ in range(8)]
        after = loss_fn(model, x) if outside == "autocast" else None
    assert_same([bits(loss) for loss in losses], [bits(loss) for loss in want])
    assert_same([bits(p) for p in model.parameters()], [bits(p) for p in trained.parameters()])
    if after is not None:
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(after, loss_fn(model, x)), "a call behind the last step sees its weights"


# Checkpointing.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, low, reentrant):
    """A9: the recomputation runs in forward's dtypes though backward is called outside autocast; same gradients."""
    results, seen = [], []
    for wrapped in (False, True):
        model, _, x = make_training(device)
        x.requires_grad_()

        def forward(x, model=model):
            seen.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            return model(x)

        with torch.autocast(device, dtype=low):
            out = checkpoint(forward, x, use_reentrant=reentrant) if wrapped else forward(x)
            loss = out.float().square().mean()
        loss.backward()
        results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert seen == [(True, low)] * 3, "plain, checkpointed, recomputed"
    assert results[0][0].dtype is low
    assert_same(*([bits(tensor) for tensor in result] for result in results))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same_products(reentrant):
    """A9: below autocast, the recomputed products have the dtypes of the first ones, also with it off inside."""
    model, _, x = make_training("cpu")
    x.requires_grad_()

    def forward(x):
        y = model[0](x)
        with torch.autocast("cpu", enabled=False):
            return model[2](torch.tanh(y.float()))

    with Casts() as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = checkpoint(forward, x, use_reentrant=reentrant).square().mean()
        first = list(seen.products)
        loss.backward()
    assert first == [torch.bfloat16, torch.float32]
    assert seen.products[2:4] == first


@pytest.mark.parametrize("engine", [("cpu", "off"), *ENGINES])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_a_step(engine, reentrant):
    """A9: a checkpointed model in graphed_step trains as the plain one."""
    device, graph = engine
    trained = []
    for wrapped in (False, True):
        model, optimizer, x = make_training(device)

        def loss(model, x, wrapped=wrapped):
            x = x.detach().requires_grad_(reentrant)  # reentrant checkpointing needs an input that does
            out = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False) if wrapped else model(x)
            return out.float().square().mean()

        step = ampkit.graphed_step(loss, model, optimizer, policy="bfloat16", graph=graph)
        for _ in range(6):
            step(x)
        trained.append([bits(p) for p in model.parameters()])
    assert_same(*trained)
