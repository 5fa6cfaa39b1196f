"""Steps are captured although somebody keeps the autograd graph of an earlier step, as by its loss."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ENGINES, assert_same, boosted_loss, deterministic, make_batches, make_net
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit._torch.autograd.autograd import CAN_RUN_ON_ONE_STREAM
from ampkit._torch.autograd.gradient_nodes import node_notes, renew_gradient_nodes

Engine = tuple[str, str]

renews = pytest.mark.skipif(CAN_RUN_ON_ONE_STREAM, reason="this torch captures kept nodes as they are")


def renew(*modules: nn.Module) -> None:
    renew_gradient_nodes([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])


def noted(param: Tensor) -> bool:
    """Return whether the node is the one that got this note."""
    return "test" in node_notes(param)


def note(param: Tensor) -> bool:
    """Return whether the node is kept alive: then it keeps a note."""
    node_notes(param)["test"] = True
    return noted(param)


# ----------------------------------------------------------------------------------------------------------- the nodes


@renews
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_kept_node_is_renewed(dtype: torch.dtype) -> None:
    """The parameter is as it was; both graphs add to its gradient, and hooks of the tensor see both."""
    layer = nn.Linear(3, 2, bias=False, dtype=dtype)
    weight = layer.weight
    seen: list[str] = []
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    kept = layer(torch.ones(1, 3, dtype=dtype)).sum().abs()
    assert note(weight)
    before = weight.detach().clone(), weight.data_ptr(), weight._version, weight.stride()
    renew(layer)
    assert not noted(weight)
    assert_same((weight.detach().clone(), weight.data_ptr(), weight._version, weight.stride()), before)
    kept.backward()
    once = weight.grad.clone()
    layer(torch.ones(1, 3, dtype=dtype)).sum().abs().backward()
    assert_same(weight.grad, once + once)
    assert seen == ["gradient", "accumulated"] * 2


def test_what_is_saved_for_the_old_backward_stays_valid() -> None:
    """No version counts up, so that the kept graph can still use the parameters that it saved."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    layers(x).sum().backward()
    expected = [param.grad.clone() for param in layers.parameters()]
    layers.zero_grad()
    kept = layers(x).sum()
    renew(layers)
    kept.backward()
    assert_same([param.grad for param in layers.parameters()], expected)


def test_nothing_is_changed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kept graph, and for what has no node, no data are touched."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).requires_grad_(True)
    net[2].requires_grad_(False)
    net(torch.ones(2, 3)).sum().backward()
    touched: list[Tensor] = []
    monkeypatch.setattr("ampkit._torch.autograd.gradient_nodes._renew", touched.append)
    renew(net)
    with torch.no_grad():
        renew(net)
    with torch.inference_mode():
        renew(net, nn.Linear(2, 2))
    renew(nn.LazyLinear(3))
    assert not touched


def test_nodes_that_python_holds_stay() -> None:
    """`register_multi_grad_hook` waits for the nodes that it has seen, and goes on to work."""
    layer = nn.Linear(3, 2)
    calls: list[int] = []
    handle = register_multi_grad_hook(list(layer.parameters()), lambda grads: calls.append(len(grads)))
    kept = layer(torch.ones(1, 3)).sum()
    held = get_gradient_edge(layer.weight).node
    renew(layer)
    assert get_gradient_edge(layer.weight).node is held
    layer(torch.ones(1, 3)).sum().backward()
    assert calls == [2]
    assert kept.requires_grad
    handle.remove()


def test_nodes_of_ddp_stay(tmp_path: Path) -> None:
    """The Reducer has hooks on them, also where only the module in the wrapper is known. `Reducers` makes it anew."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(nn.Linear(3, 2))
        assert note(ddp.module.weight)
        renew(ddp.module)
        assert noted(ddp.module.weight)
    finally:
        dist.destroy_process_group()


@renews
def test_an_error_leaves_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should torch refuse, the parameter has its memory, and the error is shown."""
    layer = nn.Linear(3, 2)
    kept = layer(torch.ones(1, 3)).sum()
    address = layer.weight.data_ptr()

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        renew(layer)
    assert (layer.weight.data_ptr(), layer.weight.dtype) == (address, torch.float32)
    assert kept.requires_grad


# ----------------------------------------------------------------------------------------------------------- the steps


def loss_of(model: nn.Module, *batch: Tensor) -> Tensor:
    return boosted_loss(model, *batch)[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("when", ["before the step", "between warm-up and capture", "before each call"])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.quick(3)
@pytest.mark.sampled(2)
def test_a_kept_loss(engine: Engine, when: str, policy: str | None) -> None:
    """A loss of an eager step is alive while a step warms up and is captured: the bits are those without it."""
    device, graph = engine
    batches = make_batches(device, [4] * 7)

    def run(keep: Callable[[int], bool]) -> tuple[Any, int]:
        model = make_net(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = ampkit.graphed_step(loss_of, model, optimizer, policy=policy, graph=graph, on_failure="raise")
        kept: list[Tensor] = []
        for i, batch in enumerate(batches):
            if keep(i):
                model.eval()  # so that the statistics of batch norm stay as they are
                kept.append(loss_of(model, *batch))
                model.train()
            step(*batch)
        return [model.state_dict(), optimizer.state_dict()], step.replays

    keeps: dict[str, Callable[[int], bool]] = {
        "before the step": lambda i: i == 0,
        "between warm-up and capture": lambda i: i == 3,
        "before each call": lambda i: True,
    }
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a node runs on another stream
        expected, replays = run(lambda i: False)
        found, found_replays = run(keeps[when])
    assert_same(found, expected)
    assert found_replays == replays == 4


# ------------------------------------------------------------------------------------ threads of the backward passes


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_passes_run_in_the_calling_thread(engine: Engine) -> None:
    """Those of a step, eager or captured, and none of another thread; behind a call, also a failed one, as before."""
    device, graph = engine
    here, threads, elsewhere = threading.get_ident(), [], []
    model = torch.nn.Linear(4, 2).to(device)

    def backward(threads: list[int]) -> None:
        y = torch.ones(3, device=device, requires_grad=True) * 2
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()

    def loss_fn(model: torch.nn.Module, x: Tensor) -> Tensor:
        if not elsewhere:
            thread = threading.Thread(target=lambda: elsewhere.append(torch._C._is_multithreading_enabled()))
            thread.start()
            thread.join()
        if len(x) == 1:
            raise LookupError("a mistake of the user")
        y = model(x)
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        return y.square().mean()

    for way in (graph, "off"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(loss_fn, model, optimizer, graph=way, host_writes="ignore")
        for _ in range(6):
            step(torch.ones(3, 4, device=device))
        assert step.replays == (3 if way == graph else 0)
        with pytest.raises(LookupError):
            step(torch.ones(1, 4, device=device))
    assert set(threads) == {here}
    assert elsewhere == [True]
    behind: list[int] = []
    backward(behind)
    assert (behind == [here]) is (device == "cpu")
