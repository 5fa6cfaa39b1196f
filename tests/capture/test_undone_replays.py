"""A replay that ends at a cut, because the answer is another one, has done nothing that a user could see."""

import ctypes
import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from harness import ENGINES, bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit

CALLS, OTHER = 24, 14  # in that call the answer is another one


def asks(h: Tensor, flag: Tensor) -> Tensor:
    """Return something else than zeros if the flag is set; it is no question about the input alone."""
    return (h.detach() * 0 + flag).max() > 0


class Case(NamedTuple):
    """A step, and what the user may look at behind each call."""

    net: nn.Module
    loss_fn: Callable[[nn.Module, Tensor, Tensor], Tensor]
    look: Callable[[], Sequence[Any]] = list
    options: Mapping[str, Any] = MappingProxyType({})


def statistics_that_are_clamped(device: str) -> Case:
    """`batch_norm` writes them in front of the cut, where no operation says so, and `after_step` behind it."""

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        h = net(x)
        return (h * 0.5 if asks(h, flag) else h).square().mean()

    def clamp(net: Any) -> None:
        with torch.no_grad():
            net[1].running_var.clamp_(0.01, 0.9)

    return Case(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), loss_fn, options={"after_step": clamp})


def tensor_of_no_module(device: str) -> Case:
    """As the center of DINO's loss."""
    center = torch.zeros(4, device=device)

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        h = net(x)
        center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        loss = (h - center).square().mean()
        return loss * 0 if asks(h, flag) else loss

    return Case(nn.Linear(4, 4), loss_fn, lambda: [center])


def what_an_earlier_call_has_left(device: str) -> Case:
    """The call that raises leaves nothing."""
    kept: dict[str, Tensor] = {}

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        h = net(x)
        if asks(h, flag):
            raise ValueError("bad")
        kept["h"] = h[:, None].expand(4, 2, 4)
        return h.square().mean()

    return Case(nn.Linear(4, 4), loss_fn, lambda: [kept["h"].detach()])


def zeros_that_are_filled(device: str) -> Case:
    """They are no constant once `batch_norm` has written to them."""

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
        h = F.batch_norm(x + 2 * flag, mean, var, training=True, momentum=1.0)
        out: Tensor = net(h * 0.5 if (mean > 1).any() else h)
        return out.square().mean()

    return Case(nn.Linear(4, 4), loss_fn)


def flag_on_the_host(device: str) -> Case:
    """Each branch sets it, and the step does not read it."""

    def loss_fn(net: Any, x: Tensor, flag: Tensor) -> Tensor:
        h: Tensor = net(x)
        net.skipped = bool(asks(h, flag))
        return (h * 0).sum() if net.skipped else h.square().mean()

    net: Any = nn.Linear(4, 4)
    return Case(net, loss_fn, lambda: [net.skipped])


def checkpointed(device: str) -> Case:
    """What checkpointing holds open around the question is closed before the call is made eagerly."""

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            h = torch.tanh(net(x))
            return torch.tanh(h * 2) if asks(h, flag) else h

        out: Tensor = checkpoint(block, x, use_reentrant=False)
        return out.square().mean()

    return Case(nn.Linear(4, 4), loss_fn)


CASES = [
    statistics_that_are_clamped,
    tensor_of_no_module,
    what_an_earlier_call_has_left,
    zeros_that_are_filled,
    flag_on_the_host,
    checkpointed,
]


def history(case: Case, graph: str, device: str) -> list[list[Any]]:
    """Return loss or error, the state, and what the user may look at behind each call."""
    net = case.net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(case.loss_fn, net, optimizer, graph=graph, **case.options)
    made, found = torch.Generator().manual_seed(1), []
    for i in range(CALLS):
        x = torch.rand(4, 4, generator=made).to(device)
        try:
            out: Any = step(x, torch.full((), float(i == OTHER), device=device)).loss
        except ValueError as error:
            out = str(error)
        seen = [out, *net.state_dict().values(), *case.look()]
        found.append([bits(each).clone() if isinstance(each, Tensor) else each for each in seen])
    step.close()
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tape", [False, True], ids=["calls Python", "calls none"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_it_has_done_nothing(engine: tuple[str, str], make: Callable[[str], Case], tape: bool) -> None:
    """D3, W1: behind each call, all is as in an eager loop."""
    device, graph = engine
    if tape and device == "cuda":
        pytest.skip("a CUDA graph calls no Python anyway")
    found = []
    with deterministic(), taped() if tape else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for way in ("off", graph):
            torch.manual_seed(0)
            found.append(history(make(device), way, device))
    for i, (old, new) in enumerate(zip(*found, strict=True)):
        for left, right in zip(old, new, strict=True):
            same = torch.equal(left, right) if isinstance(left, Tensor) else left == right
            assert same, f"call {i}: {left} and {right}"


def test_memory_whose_storage_tells_its_address() -> None:
    """D3: as with `tensor.data_ptr()`, it is not asked ahead what code that no mode sees may have written."""

    def loss_fn(net: nn.Module, x: Tensor, flag: Tensor) -> Tensor:
        told, value, h = torch.zeros(()), flag.clone(), net(x)
        ctypes.memmove(told.untyped_storage().data_ptr(), value.untyped_storage().data_ptr(), 4)
        return (h * 0.5 if told > 0 else h).square().mean()

    found = []
    for way in ("off", "emulate"):
        torch.manual_seed(0)
        found.append(history(Case(nn.Linear(4, 4), loss_fn), way, "cpu"))
    for old, new in zip(*found, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(old, new, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_replaced_state_is_released(engine: tuple[str, str]) -> None:
    """D3: what is put back is no longer kept once the user has replaced it."""
    device, graph = engine
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = net(x)
        return (h * 0.5 if asks(h, torch.zeros_like(h[0, 0])) else h).square().mean()

    with ampkit.graphed_step(loss_fn, net, optimizer, graph=graph) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for _ in range(8):
            step(torch.rand(4, 4, device=device))
        assert step.replays > 0
        memory = StorageWeakRef(net[1].running_mean.untyped_storage())
        net[1].running_mean = torch.zeros(4, device=device)
        step(torch.rand(4, 4, device=device))
        gc.collect()
        assert memory.expired()
