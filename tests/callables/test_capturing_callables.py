"""make_graphed_callables(capturing=): modules whose code asks whether it is being captured."""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, seeing_capture
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampkit

pytestmark = pytest.mark.usefixtures("no_device_is_needed")

Engine = tuple[str, str]
asks = torch.cuda.is_current_stream_capturing  # imported by name, before any capture


class Asking(nn.Module):
    """Takes another branch, with other bits, when it is told that it is being captured."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = checkpointed
        self.told: list[bool] = []

    def branch(self, x: Tensor) -> Tensor:
        self.told.append(asks())
        return torch.tanh(self.inner(x)) if self.told[-1] else self.unseen(self.inner(x))

    def unseen(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return self.last(checkpoint(self.branch, x, use_reentrant=False))
        return self.last(self.branch(x))


class Reading(Asking):
    """In the branch for eager calls it reads a value on the host, and binds a tensor: no graph contains that."""

    def unseen(self, x: Tensor) -> Tensor:
        self.largest = x.detach().abs().max()
        return torch.sigmoid(x) if bool(self.largest < 100) else x


class Hopeless(Reading):
    """Reads in both branches."""

    def branch(self, x: Tensor) -> Tensor:
        self.smallest = x.detach().min()
        return super().branch(x * float(self.smallest))


def trained(
    engine: Engine, kind: type[Asking], told: bool | None = None, **options: Any
) -> tuple[list[Tensor], Asking, Any, list[str]]:
    """Train for 6 calls. Return losses and parameters, the module, its forward, and the warnings.

    Args:
        told: what a module that is not graphed is told; None graphs it.
    """
    torch.manual_seed(0)
    model = kind(options.pop("checkpointed", False)).to(engine[0])
    x = torch.linspace(-1, 1, 24, device=engine[0]).reshape(4, 6)
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        if told is None:
            ampkit.make_graphed_callables(model, (x,), graph=engine[1], **options)
        losses = []

        def one(i: int) -> None:
            loss = model(x + i / 8).square().mean()
            loss.backward()
            losses.append(loss.detach())

        for i in range(6):
            (one if told is None else seeing_capture(one, told))(i)
    grads = [param.grad for param in model.parameters()]
    messages = [str(w.message) for w in caught if issubclass(w.category, ampkit.CaptureWarning)]
    return [*losses, *grads], model, model.forward, messages


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("capturing", ["auto", False, True])
@pytest.mark.quick(3)
def test_the_answer_is_the_same_in_every_pass(engine: Engine, capturing: str | bool, checkpointed: bool) -> None:
    """R2: also where a checkpointed function is called again in backward; bits are those of eager with this answer."""
    told = capturing is True
    expected, _, _, _ = trained(engine, Asking, told, checkpointed=checkpointed)
    found, model, forward, messages = trained(engine, Asking, capturing=capturing, checkpointed=checkpointed)
    assert_same(expected, found)
    assert set(model.told) == {told}
    assert (forward.captures, forward.replays, forward.told, messages) == (1, 6, told, [])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_branch_that_no_graph_contains(engine: Engine) -> None:
    """R2: "auto" takes the other branch, and says so; False stays eager; True says nothing."""
    expected, _, _, _ = trained(engine, Reading, True)
    found, _, forward, messages = trained(engine, Reading)
    assert_same(expected, found)
    assert (forward.captures, forward.replays, forward.told) == (1, 6, True)
    assert len(messages) == 1
    assert "took a branch that a graph cannot contain: " in messages[0]
    found, _, forward, messages = trained(engine, Reading, capturing=True)
    assert_same(expected, found)
    assert (forward.replays, messages) == (6, [])
    expected, _, _, _ = trained(engine, Reading, False)
    found, _, forward, messages = trained(engine, Reading, capturing=False)
    assert_same(expected, found)
    assert (forward.replays, forward.told, len(messages)) == (0, False, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_neither_branch_can_be_captured(engine: Engine) -> None:
    """R2: the module stays eager, on the branch for eager calls, with one warning; its state is what it was."""
    expected, _, _, _ = trained(engine, Hopeless, False)
    found, model, forward, messages = trained(engine, Hopeless)
    assert_same(expected, found)
    assert (forward.captures, forward.replays, forward.told, len(messages)) == (0, 0, False, 1)
    assert "capturing=" not in messages[0]
    assert not model.told[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_eager_calls_are_told_too(engine: Engine) -> None:
    """R2: a call without gradients, in another mode, or before the last one's backward, takes the same branch."""
    for capturing, options in itertools.product((True, "auto"), ({}, {"graph": "off"})):
        if capturing == "auto" and options:
            continue
        torch.manual_seed(0)
        model = Reading().to(engine[0])
        x = torch.ones(4, 6, device=engine[0])
        given = {"graph": engine[1], **options, "capturing": capturing}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            ampkit.make_graphed_callables(model, (x,), **given)
        model.told.clear()
        first = model(x)
        again = model(x)
        with torch.no_grad():
            quiet = model(x)
        assert set(model.told) == {True}
        assert_same([first, again], [again, quiet])
        assert not asks()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layout_captured_before_is_captured_again(engine: Engine) -> None:
    """R2: the answer changes when a second layout needs it; then the first one gets a graph with that answer, too."""

    class ForLargeBatches(Reading):
        def unseen(self, x: Tensor) -> Tensor:
            return super().unseen(x) if len(x) > 4 else torch.sigmoid(x)

    torch.manual_seed(0)
    model = ForLargeBatches().to(engine[0])
    small, large = (torch.ones(size, 6, device=engine[0]) for size in (4, 8))
    ampkit.make_graphed_callables(model, (small,), graph=engine[1])
    before = model(small).detach()
    assert not model.forward.told
    with pytest.warns(ampkit.CaptureWarning, match="From now on the answer is True"):
        model(large).sum().backward()
    after = model(small).detach()
    assert (model.forward.captures, model.forward.replays) == (3, 3)
    hidden = [branch(model.inner(small)) for branch in (torch.sigmoid, torch.tanh)]
    assert_same([before, after], [model.last(each) for each in hidden])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpointed_function_in_an_eager_call(engine: Engine) -> None:
    """R2: backward would call it again without telling it, so such a call is refused; "auto" does not get there."""
    model = Asking(checkpointed=True).to(engine[0])
    x = torch.ones(4, 6, device=engine[0])
    ampkit.make_graphed_callables(model, (x,), graph=engine[1], capturing=True)
    pending = model(x)
    with pytest.raises(NotImplementedError, match="within a checkpointed function"):
        model(x)
    with torch.no_grad():
        model(x)
    pending.sum().backward()
    _, _, forward, messages = trained(engine, Reading, checkpointed=True)
    assert (forward.replays, forward.told, len(messages)) == (0, False, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_within_a_step_that_is_told(engine: Engine) -> None:
    """R2: the answer around the callable counts: it is called eagerly there, with the bits of the plain module."""
    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = Asking().to(engine[0])
        x = torch.ones(4, 6, device=engine[0])
        if graph != "off":
            ampkit.make_graphed_callables(model, (x,), graph=graph)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(), model, optimizer, graph=graph, capturing=True, host_writes="ignore"
        )
        with deterministic():
            for _ in range(6):
                step(x)
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(*results)
    assert step.replays == 3


def test_arguments() -> None:
    """Another value is refused with the ones that work; a copy of a told module is the plain module."""
    model = nn.Linear(6, 6)
    with pytest.raises(ValueError, match=r"capturing='yes'.*'auto', True or False"):
        ampkit.make_graphed_callables(model, (torch.ones(4, 6),), graph="emulate", capturing="yes")
    ampkit.make_graphed_callables(model, (torch.ones(4, 6),), graph="emulate", capturing=True)
    assert type(copy.deepcopy(model)) is nn.Linear
