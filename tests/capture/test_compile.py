"""Steps with torch.compile, torch.cond or checkpointing: captured, or named; with CUDA graphs of their own: refused."""

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from harness import (
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit

Engine = tuple[str, str]


def trajectory(engine: Engine, graph: str, wrap: Callable[[nn.Module], Any], loss_fn: Callable[..., Any]) -> list[Any]:
    model = make_net(engine[0], dropout=0.0)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        loss_fn, wrap(model), optimizer, policy="bfloat16", max_norm=1.0, graph=graph, on_failure="raise"
    )
    torch.manual_seed(5)
    history = []
    for batch in make_batches(engine[0], [8] * 5 + [6] * 5 + [8, 6]):
        out = step(*batch)
        history.append((out.loss, training_state(model, optimizer, step.scaler)))
    assert step.replays == (6 if graph != "off" else 0)
    return history


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["model", pytest.param("loss", marks=pytest.mark.seeds)])
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_compiled_in_the_default_mode(engine: Engine, part: str) -> None:
    """A step with a compiled model or loss is captured with the bits of the compiled eager step, for two shapes."""
    backend = "inductor" if engine[0] == "cuda" or part == "model" else "aot_eager"

    def compiled(thing: Any) -> Any:
        return torch.compile(thing, backend=backend, dynamic=False)

    with deterministic():
        histories = []
        for graph in ("off", engine[1]):
            loss_fn = compiled(boosted_loss) if part == "loss" else boosted_loss
            wrap = compiled if part == "model" else lambda model: model
            histories.append(trajectory(engine, graph, wrap, loss_fn))
    assert_same(*histories)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(engine: Engine, reentrant: bool) -> None:
    """A9, G5: activation checkpointing with dropout has eager's bits in a graph."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            def inner(h: Tensor) -> Tensor:
                return F.dropout(self.layer(h).relu(), 0.3)

            return self.head(checkpoint(inner, self.stem(x), use_reentrant=reentrant))

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        model = Block().to(engine[0])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(), model, optimizer, policy="bfloat16", graph=graph, on_failure="raise"
        )
        torch.manual_seed(5)
        history = []
        for i in range(8):
            out = step(torch.full((16, 8), 0.1 * i, device=engine[0]))
            history.append((out.loss, training_state(model, optimizer, step.scaler)))
        assert step.replays == (5 if graph != "off" else 0)
        return history

    with deterministic():
        assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("part", ["model", "child", "in place", "loss_fn"])
@pytest.mark.quick(4)
def test_cuda_graphs_of_their_own_are_refused(mode: str, part: str) -> None:
    """torch.compile(mode="reduce-overhead") captures by itself: refused with the remedy, fine with graph="off"."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    loss_fn: Any = lambda m, x: m(x).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if part == "model":
        model = torch.compile(model, mode=mode)
    elif part == "child":
        model[0] = torch.compile(model[0], mode=mode)
    elif part == "in place":
        model[1].compile(mode=mode)
    else:
        loss_fn = torch.compile(loss_fn, mode=mode)
    with pytest.raises(ValueError, match=r"CUDA graphs of its own.*torch.compile\(model\), or pass graph='off'"):
        ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate")
    ampkit.graphed_step(loss_fn, model, optimizer, graph="off")
    plain = torch.compile(nn.Linear(2, 2), mode="max-autotune-no-cudagraphs")
    ampkit.graphed_step(lambda m, x: m(x).mean(), plain, torch.optim.SGD(plain.parameters(), fused=True), graph="off")


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compilation_within_the_capture_is_refused() -> None:
    """A compilation during the capture is an error whose message has the remedy, and training goes on."""
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return (torch.compile(lambda y: y.square().mean()) if len(calls) > 3 else lambda y: y.square().mean())(model(x))

    model = nn.Linear(4, 4).cuda()
    step = ampkit.graphed_step(
        loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), host_writes="ignore"
    )
    torch.compile(lambda y: y + 1)(torch.ones(2, device="cuda"))  # so that dynamo is there
    x = torch.ones(2, 4, device="cuda")
    for _ in range(3):
        step(x)
    with pytest.warns(ampkit.CaptureWarning, match="torch.compile had not compiled"):
        step(x)
    assert step.report().eager["capture failed"] == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_batches_that_are_views(engine: tuple[str, str]) -> None:
    """R11: compiled code detaches views that it saves for its backward, unlike the buffers of a graph."""
    images, labels = torch.randn(8, 4, 3), torch.randint(0, 5, (8, 4))
    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = nn.Linear(3, 5).to(engine[0])
        loss = torch.compile(lambda model, x, y: F.cross_entropy(model(x), y), backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = ampkit.graphed_step(loss, model, optimizer, graph=graph, on_failure="raise")
        stacked = images.to(engine[0]), labels.to(engine[0])
        results.append([step(*batch).loss for batch in zip(*stacked, strict=True)])
    assert_same(*results)
    assert (step.replays, step.report().eager) == (5, {"warm-up": 3})


@pytest.mark.parametrize(
    ("engine", "by_ampkit"),
    [  # on a CPU Inductor compiles C++, which takes half a minute
        pytest.param(ENGINES[0], False, marks=pytest.mark.seeds, id="compiled model-cpu"),
        pytest.param(ENGINES[0], True, id="compile=-cpu"),
        pytest.param(*ENGINES[1].values, False, marks=ENGINES[1].marks, id="compiled model-cuda"),
        pytest.param(*ENGINES[1].values, True, marks=ENGINES[1].marks, id="compile=-cuda"),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_verified_with_dropout(engine: Engine, by_ampkit: bool) -> None:
    """Inductor's random seeds lie in memory that no operation was seen to allocate."""
    model = make_net(engine[0], dropout=0.5)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wrapped = model if by_ampkit else torch.compile(model, dynamic=False)
    step = ampkit.graphed_step(
        boosted_loss,
        wrapped,
        optimizer,
        policy="bfloat16",
        verify=2,
        compile="default" if by_ampkit else None,
        graph=engine[1],
        on_failure="raise",
    )
    with deterministic():
        for batch in make_batches(engine[0], [8] * 7):
            step(*batch)
    assert step.replays > 2


class Chooses(nn.Module):
    """A branch that the device decides on: below dispatch modes, torch.cond reads its condition on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        chosen = torch.cond(x.sum() > 0, lambda x: self.first(x).sin(), lambda x: self.second(x).cos(), (x,))
        return self.head(chosen)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_torch_cond_is_named_and_trained(engine: Engine) -> None:
    """R11: operators of higher order pass through the modes that watch a step; the one that waits is named, once."""
    batches = torch.randn(6, 4, 3), torch.randint(0, 5, (6, 4))
    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = Chooses().to(engine[0])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = ampkit.graphed_step(
            lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer, policy="bfloat16", graph=graph
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [step(x.to(engine[0]), y.to(engine[0])).loss for x, y in zip(*batches, strict=True)]
        results.append([*losses, *model.parameters()])
    assert_same(*results)
    assert step.replays == 0
    assert "1 line of the step cannot be captured" in str(caught[0].message)
    assert str(caught[0].message).count("torch.cond waits for the device to read its condition") == 1


def test_torch_cond_is_a_row_of_explain() -> None:
    """What chooses a branch has no schema; its operations are hidden from modes."""
    explanation = ampkit.explain(Chooses(), torch.randn(4, 3), policy="bfloat16")
    assert "cond" in [row.op for row in explanation.rows]


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_inductor_allocates(engine: Engine) -> None:
    """Code of Inductor's makes a tensor that no operation has made. A line that reads it reads nothing of before."""
    device, graph = engine
    written = ModuleType("torch._inductor.runtime.compile_tasks.c_of_a_test")
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
    vars(written)[f"empty_strided_{device}"] = allocate
    code = f"import torch\ndef call(): return empty_strided_{device}((3,), (1,), torch.float32)"
    exec(compile(code, "inductors.py", "exec"), vars(written))

    @ampkit.graphed(modules=(), graph=graph, on_failure="raise")
    def function(x: Tensor) -> Tensor:
        return x + torch.zeros_like(written.call())

    with mock.patch.dict(sys.modules, {written.__name__: written}):
        for i in range(5):
            assert torch.equal(function(torch.full((3,), float(i), device=device)).cpu(), torch.full((3,), float(i)))
    assert function.replays == 2
    assert vars(written)[f"empty_strided_{device}"] is allocate
    assert getattr(torch._C._dynamo.guards, f"_empty_strided_{device}") is allocate


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_a_compiled_loss_of_a_function(engine: Engine) -> None:
    """backward reads the loss, which compiled code has made. In a process with older compiled code, too."""
    device, graph = engine

    def run(graph: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, fused=True)
        loss_of = torch.compile(lambda x: model(x).square().mean() + 1)

        @ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph=graph, on_failure="raise")
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_of(x)
            loss.backward()
            optimizer.step()
            return loss

        losses = [step(torch.full((3, 4), i / 8.0, device=device)) for i in range(8)]
        losses.append(step.scan(torch.full((5, 3, 4), 0.5, device=device)))
        assert step.report().launches == (graph != "off")
        return losses

    with deterministic():
        assert_same(run(graph), run("off"))
