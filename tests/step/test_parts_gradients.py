"""Gradients in a step in parts: of which tensors, how often, and under which autocast and settings of torch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from pool_tape import in_capture, pooled
from split_harness import WIDTH, Block
from torch import Tensor, nn

import ampkit
from ampkit._step.parts.part_passes import PartPasses

pytestmark = pytest.mark.usefixtures("untimed")

Engine = tuple[str, str]
WATCHED = 5  # calls before the first one in which graphs are replayed
CALLS = 3 * WATCHED


class ReadsDefaultDtype(torch.autograd.Function):
    """Its gradient depends on a setting of torch. What it saves, it saves in another place in a capture."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_captured = in_capture()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.is_captured is in_capture(), "attention would end the process"
        return grad * (2 + 1e3 * torch.finfo(torch.get_default_dtype()).eps)


class Part(nn.Module):
    """Attention, whose backward casts under autocast, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, "gelu", batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return ReadsDefaultDtype.apply(self.block(self.attention(x)))  # type: ignore[no-any-return]


class Run:
    """A function with two modules, and a line that no graph can hold. It calls a case, and returns what that returns.

    Attributes:
        odd: whether the present call does the unusual thing.
        hidden: what the first module returns.
        loss: the loss, from float32.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype | None, case: "Case") -> None:
        self.device, graph = engine
        self._dtype = dtype
        torch.manual_seed(1)
        self.first, self.second = Part().to(self.device), Part().to(self.device)
        self.params = [*self.first.parameters(), *self.second.parameters()]
        self.weight = self.first.block.first.weight
        self.odd = False
        optimizer = torch.optim.AdamW(self.params, lr=1e-2)

        @ampkit.graphed(modules=(self.first, self.second), optimizers=(optimizer,), graph=graph)
        def step(x: Tensor, flag: Tensor) -> Any:
            self.odd = len((flag * self.weight.detach().abs().max()).nonzero()) > 0
            with self.autocast():
                self.hidden = self.first(x)
                self.loss = self.second(self.hidden).float().square().mean()
                found = case(self, True)
            found = [*found, *case(self, False)]
            found += [param.grad.clone() for param in self.params if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            return found

        self.step = step

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self.device, self._dtype)

    def history(self, odd: Callable[[int], bool]) -> list[Any]:
        torch.manual_seed(2)
        made = []
        for i in range(CALLS):
            x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(i)).to(self.device)
            found = self.step(x, torch.tensor([float(odd(i))], device=self.device))
            made.append([bits(value) for value in (*found, *self.params, torch.rand(2, device=self.device))])
        return made


Case = Callable[[Run, bool], Any]  # it is called within the autocast, with True, and behind it


def of_one_weight(run: Run, within: bool) -> Any:
    if within:
        return torch.autograd.grad(run.loss, [run.weight], retain_graph=True)
    return run.loss.backward() or ()


def of_one_weight_in_some_calls(run: Run, within: bool) -> Any:
    if within and run.odd:
        return torch.autograd.grad(run.loss, [run.weight, run.hidden], retain_graph=True)
    return () if within else run.loss.backward() or ()


def backward_within(run: Run, within: bool) -> Any:
    return run.loss.backward() or () if within else ()


def backward_within_in_some_calls(run: Run, within: bool) -> Any:
    return run.loss.backward() or () if within is run.odd else ()


def of_some_inputs(run: Run, within: bool) -> Any:
    if within:
        return ()
    if run.odd:
        run.loss.backward(inputs=[run.weight, run.second.block.second.bias], retain_graph=True)
    return run.loss.backward() or ()


def of_some_inputs_alone(run: Run, within: bool) -> Any:
    if within is run.odd:
        run.loss.backward(inputs=[run.second.block.first.weight, run.weight] if run.odd else None)
    return ()


def retained_gradient(run: Run, within: bool) -> Any:
    if within:
        return run.hidden.retain_grad() or ()
    run.loss.backward()
    return [run.hidden.grad.clone()] if run.hidden.grad is not None else ()


def create_graph(run: Run, within: bool) -> Any:
    if within and run.odd:
        grads = torch.autograd.grad(run.loss, [run.weight], create_graph=True)
        return [grad.detach() for grad in grads]
    return () if within else run.loss.backward() or ()


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def under_another_setting(run: Run, within: bool) -> Any:
    if within:
        return ()
    with float64() if run.odd else nullcontext():
        return run.loss.backward() or ()


def with_a_default_device(run: Run, within: bool) -> Any:
    if within:
        return ()
    with torch.device(run.device):
        return run.loss.backward() or ()


CASES: list[Case] = [
    of_one_weight,
    of_one_weight_in_some_calls,
    backward_within,
    backward_within_in_some_calls,
    of_some_inputs,
    of_some_inputs_alone,
    retained_gradient,
    create_graph,
    under_another_setting,
    with_a_default_device,
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_have_the_bits_of_eager_calls(
    engine: Engine, dtype: torch.dtype | None, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: whichever gradients are asked for, and under whichever autocast and settings backward begins."""

    def odd(i: int) -> bool:
        return i > WATCHED and (i // 2) % 2 == 0

    def run_apart(part: PartPasses, *args: Any, **kwargs: Any) -> Any:
        apart.append(part)
        return run_backward(part, *args, **kwargs)

    apart: list[PartPasses] = []
    run_backward = PartPasses.run_backward
    monkeypatch.setattr(PartPasses, "run_backward", run_apart)
    with deterministic(), pooled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected = Run((engine[0], "off"), dtype, case).history(odd)
        run = Run(engine, dtype, case)
        found = run.history(odd)
    for i, (now, before) in enumerate(zip(found, expected, strict=True)):
        assert_same(now, before, f"call {i}")
    report = run.step.report()
    assert report.in_parts == CALLS - WATCHED
    assert [part.replays for part in report.parts] == [CALLS - WATCHED] * 2, report
    if case in (backward_within, retained_gradient, with_a_default_device):
        assert not apart, "each backward pass is replayed"
