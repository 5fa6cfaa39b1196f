"""Batches that are slices of larger tensors: kernels choose by an address how they add, and a graph reads a copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from split_harness import Block, assert_same_as_eager
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
LossFn = Callable[..., Tensor]
ROWS, WIDTH = 5, 13  # 260 bytes of float32: a slice in nine of ten begins where torch would allocate nothing
STEPS = 12
begins: list[int] = []  # of the inputs of `Noted`


def slices(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return batches that are slices of one tensor, with other remainders of their addresses."""
    data = torch.randn(STEPS * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return [data[i * ROWS : (i + 1) * ROWS] for i in range(STEPS)]


def sums(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a loss of operations whose kernels look at addresses."""
    normed = F.layer_norm(inputs.float(), (WIDTH,))
    return model(inputs).square().mean() + inputs.float().sum() * normed.var() * 1e-3 + inputs.float().mean(0).norm()


def make(engine: Engine, loss_fn: LossFn, graph: str | None = None, **options: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return a step and the weights that it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, 1)).to(engine[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph or engine[1], **options, host_writes="ignore")
    return step, list(model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.quick(3)
@pytest.mark.sampled(2)
def test_slices_of_a_larger_tensor(engine: Engine, policy: str | None, dtype: torch.dtype) -> None:
    """G10: each call has the bits of an eager one, wherever its batch lies."""

    def loss_fn(model: nn.Module, inputs: Tensor) -> Tensor:
        return sums(model, inputs if policy else inputs.float()) + inputs.sum() * inputs.var(0).sum()

    if dtype is torch.float64 and policy:
        pytest.skip("autocast leaves float64 alone, and the model's weights are not float64")
    with deterministic():
        found = []
        for graph in ("off", engine[1]):
            step, weights = make(engine, loss_fn, graph, policy=policy)
            losses = [step(batch).loss for batch in slices(engine[0], dtype)]
            found.append((losses, weights))
        assert step.report().replays
        assert_same(found[1], found[0], "graphed and eager")


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_eager_calls_get_aligned_copies(graph: str) -> None:
    """G10: what runs eagerly, and what is captured, finds the batch where torch would have allocated it."""
    seen: list[bool] = []

    def loss_fn(model: nn.Module, inputs: Tensor, rest: dict[str, Tensor]) -> Tensor:
        seen.extend(tensor.data_ptr() % 64 == 0 for tensor in (inputs, rest["more"]))
        return sums(model, inputs) + rest["more"].sum()

    step, _ = make(("cpu", "emulate"), loss_fn, graph, verify=2)
    for batch in slices("cpu"):
        step(batch, {"more": batch[1:, 2:7]})
    assert len(seen) >= 2 * STEPS
    assert all(seen)


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_eager_calls_get_the_values_of_lazy_views(graph: str) -> None:
    """G10: torch conjugates and negates where a tensor is read; what a graph reads holds the values."""
    seen: list[bool] = []

    def loss_fn(model: nn.Module, inputs: Tensor, other: Tensor) -> Tensor:
        seen.extend((inputs.is_neg(), other.is_conj()))
        inputs += 1
        return sums(model, inputs) + other.abs().sum()

    step, _ = make(("cpu", "emulate"), loss_fn, graph, verify=2)
    for _ in range(STEPS):
        number = torch.randn(8, WIDTH, dtype=torch.complex64)
        before = number.clone()
        step(number.conj().imag, before.conj())
        assert torch.equal(number, torch.complex(before.real, before.imag - 1))
    assert not any(seen)
    assert len(seen) >= 2 * STEPS or graph == "emulate"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_step_writes_comes_back(engine: Engine) -> None:
    """G10: a batch that the step changes in place is changed in every call, also if the call got a copy."""

    def loss_fn(model: nn.Module, inputs: Tensor) -> Tensor:
        inputs.add_(1)
        return sums(model, inputs)

    step, _ = make(engine, loss_fn)
    batches = slices(engine[0])
    before = [batch.clone() for batch in batches]
    for batch in batches:
        step(batch)
    assert step.report().replays
    assert_same(batches, [batch + 1 for batch in before], "the batches")


def test_an_overlap_that_a_copy_would_hide() -> None:
    """G10: two arguments in the same memory, one of which is changed, are an error before they are two tensors."""

    def loss_fn(model: nn.Module, inputs: Tensor, again: Tensor) -> Tensor:
        inputs.mul_(2)
        return sums(model, inputs + again)

    batch = slices("cpu")[1]
    step, _ = make(("cpu", "emulate"), loss_fn, "off")
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[0\], .* as batch\[1\], .* Pass batch\[0\].clone\(\)"):
        step(batch, batch[:])


@pytest.mark.parametrize("verify", [0, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.seeds])])
@pytest.mark.parametrize("engine", ENGINES)
def test_scans_of_odd_rows(engine: Engine, verify: int) -> None:
    """R11: the calls of a stack have the bits of single calls, also where its rows lie at odd addresses."""
    with deterministic():
        stack = torch.stack([batch[:, :7] for batch in slices(engine[0]) * 3])
        assert stack[1].data_ptr() % 64

        def loss_fn(model: nn.Module, inputs: Tensor) -> Tensor:
            return sums(model, F.pad(inputs, (0, WIDTH - inputs.shape[1]))) + inputs.sum() + inputs.var(0).sum()

        single, expected = make(engine, loss_fn, "off")
        one_by_one = torch.stack([single(row).loss for row in stack])
        step, weights = make(engine, loss_fn, verify=verify)
        losses = step.scan(stack).loss
        assert_same((losses, weights), (one_by_one, expected), "(losses, weights)")
        assert step.report().launches


class Slices(nn.Module):
    """Modules around a line: their inputs, outputs and the gradients of outputs are slices at odd addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(WIDTH), Noted(WIDTH), Rest()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if float(hidden.detach().sum()) > 1e9:
            hidden = hidden * 2
        both = torch.cat([self.second(hidden[1:]), self.third(hidden)])
        return self.head(both)


class Noted(Block):
    def forward(self, x: Tensor) -> Tensor:
        begins.append(x.data_ptr() % 64)
        return super().forward(x)


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)[1:]


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("policy", [pytest.param(None, marks=pytest.mark.seeds), "float16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_modules_around_a_line(engine: Engine, policy: str | None) -> None:
    """R4: modules that are captured one by one leave the bits of eager ones, wherever their tensors begin."""

    def train(graph: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Slices().to(engine[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = ampkit.graphed_step(
            sums, model, optimizer, policy=policy, max_norm=1.0, graph=graph, host_writes="ignore"
        )
        losses = [step(batch).loss for batch in slices(engine[0])]
        return step, (losses, list(model.parameters()))

    begins.clear()
    report = assert_same_as_eager(engine, train).report()
    assert set(begins) == {WIDTH * 4}  # eager, in the capture, and in emulated replays
    assert [part.module for part in report.parts] == ["first", "second", "third"]
    assert all(part.replays == report.in_parts and not part.eager for part in report.parts), str(report)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graphed_module_gets_slices(engine: Engine) -> None:
    """G6: a module of make_graphed_callables has the bits of the module, for a slice at each kind of address."""
    results = []
    with deterministic():
        for graph in ("off", engine[1]):
            torch.manual_seed(0)
            module = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Flatten(0), nn.LayerNorm(7 * ROWS))
            module.to(engine[0])
            sample = torch.randn(ROWS, WIDTH, device=engine[0], requires_grad=True)
            graphed = ampkit.make_graphed_callables(module, (sample,), graph=graph)
            found = []
            for batch in slices(engine[0]):
                out = graphed(batch.requires_grad_())
                out.square().sum().backward()
                found.append(out.detach())
            results.append((found, [parameter.grad for parameter in module.parameters()]))
    assert_same(results[1], results[0], "graphed and not")
    assert graphed.forward.replays == STEPS
    assert graphed.forward.captures > 2
