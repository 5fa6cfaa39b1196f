"""Arguments that share memory with the state: refused where the step changes it, for a graph has a copy of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ENGINES
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t.detach(),
    "part": lambda t: t.detach()[1:3],
    "other shape": lambda t: t.detach().view(2, 2),
    "bits": lambda t: t.detach().view(torch.int32),
    "every other": lambda t: t.detach()[::2],
}


class Counter(nn.Module):
    """A module with a weight, and a buffer that moves. The buffer's storage has another tensor, which stays."""

    def __init__(self, device: str) -> None:
        super().__init__()
        whole = torch.zeros(8, device=device)
        self.register_buffer("total", whole[:4])
        self.register_buffer("fixed", torch.ones(4, device=device))
        self.beside = [whole[4:]]

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return x * 1 + 0 * self.fixed.sum().to(x.dtype)


def graphed(model: nn.Module, engine: Engine, function: Callable[..., Any] | None = None, **options: Any) -> Any:
    make = ampkit.graphed(modules=(model,), graph=engine[1], on_failure="raise", **options)
    return make(model if function is None else function)


@pytest.mark.parametrize("verify", [0, 2])
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.quick(4)
def test_an_argument_in_a_buffer_that_changes(engine: Engine, alias: str, verify: int) -> None:
    """An eager call would see the change, and a replay would not. So it is an InputMismatch with both paths."""
    model = Counter(engine[0])
    forward = graphed(model, engine, verify=verify)
    for _ in range(3):
        seen = forward(ALIASES[alias](model.total))
        assert torch.equal(seen, ALIASES[alias](model.total))
    for _ in range(2):
        with pytest.raises(
            ampkit.InputMismatch, match=r"batch\[0\] lies in the same memory as modules\[0\]\.total"
        ) as e:
            forward(ALIASES[alias](model.total))
    assert "batch[0].clone()" in str(e.value)
    assert model.total.tolist() == [3] * 4
    old = ALIASES[alias](model.total).clone()
    assert torch.equal(forward(old), old)
    assert model.total.tolist() == [4] * 4
    assert forward.captures == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_that_are_no_part_of_what_changes(engine: Engine) -> None:
    """State that the step only reads, and the rest of a storage in which some state changes, may be passed."""
    model = Counter(engine[0])
    forward = graphed(model, engine)
    for _ in range(5):
        assert torch.equal(forward(model.fixed), torch.ones(4, device=engine[0]))
        assert torch.equal(forward(model.beside[0]), torch.zeros(4, device=engine[0]))
    assert forward.replays == 7


@pytest.mark.parametrize("engine", ENGINES)
def test_what_changes_is_known_per_layout(engine: Engine) -> None:
    """The statistics of BatchNorm change in training, and may be passed in evaluation."""
    norm = nn.BatchNorm1d(4).to(engine[0])
    forward = graphed(norm, engine, lambda x, shift: norm(x) + shift)
    x, zeros = torch.randn(8, 4, device=engine[0]), torch.zeros(4, device=engine[0])
    for _ in range(4):
        forward(x, zeros)
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[1\] .* norm\.running_mean, which the step changes"):
        forward(x, norm.running_mean)
    norm.eval()
    with pytest.warns(ampkit.CaptureWarning, match="train/eval mode"):
        forward(x, norm.running_mean)
    for _ in range(5):
        torch.testing.assert_close(forward(x, norm.running_mean), norm(x) + norm.running_mean)
    assert forward.captures == 2


@pytest.mark.parametrize("what", ["parameter", "moment", "scale"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_training_step_changes(engine: Engine, what: str) -> None:
    """Parameters, optimizer state and the loss scale are changed by every step."""
    device, graph = engine
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = ampkit.GradScaler(device)
    step = ampkit.graphed_step(
        lambda m, x: F.mse_loss(m(x), x), model, optimizer, policy="float16", scaler=scaler, graph=graph
    )
    for _ in range(4):
        step(torch.randn(4, 4, device=device))
        step(torch.tensor(1.0, device=device).expand(4, 4))
    argument, path = {
        "parameter": lambda: (model.weight.detach(), "model.weight"),
        "moment": lambda: (optimizer.state[model.weight]["exp_avg"], "optimizer[0].model.weight.exp_avg"),
        "scale": lambda: (scaler.tensors()["scale"].expand(4, 4), "scaler.scale"),
    }[what]()
    before = step.replays
    with pytest.raises(ampkit.InputMismatch) as error:
        step(argument)
    assert f"lies in the same memory as {path}, which the step changes" in str(error.value)
    step(argument.clone())
    assert step.replays >= before


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_that_steps_by_data(engine: Engine) -> None:
    """A change through `.data` does not raise the parameter's version, but the parameter counts as changed."""
    device, graph = engine

    class ByData(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"capturable": True})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad, alpha=0.1)

    model = nn.Linear(4, 4, bias=False).to(device)
    step = ampkit.graphed_step(lambda m, x: m(x).sum(), model, ByData(model.parameters()), graph=graph)
    for _ in range(4):
        step(torch.ones(4, 4, device=device))
    with pytest.raises(ampkit.InputMismatch, match=r"model\.weight"):
        step(model.weight.detach())


@pytest.mark.parametrize("engine", ENGINES)
def test_an_argument_that_changes_where_state_is_read(engine: Engine) -> None:
    """An argument is refused as well if the step changes it and reads the state in the same memory."""
    model = Counter(engine[0])
    forward = graphed(model, engine, lambda x: x.add_(1).sum() + model.fixed.sum())
    x = torch.zeros(4, device=engine[0])
    for _ in range(5):
        forward(x)
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[0\], which the step changes in place, lies .*\.fixed"):
        forward(model.fixed)
    assert model.fixed.tolist() == [1] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_that_the_function_adds_to(engine: Engine) -> None:
    """A gradient that was there before is state, too."""
    model = nn.Linear(4, 4, bias=False).to(engine[0])

    def accumulate(x: Tensor) -> Tensor:
        model(x).sum().backward()
        return x.sum()

    model.weight.grad = torch.zeros(4, 4, device=engine[0])
    forward = graphed(model, engine, accumulate)
    for _ in range(4):
        forward(torch.ones(4, 4, device=engine[0]))
    with pytest.raises(ampkit.InputMismatch, match=r"model\.weight\.grad, which the step changes"):
        forward(model.weight.grad)
