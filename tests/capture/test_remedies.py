"""Lines of libraries that cannot be captured: the user's own line beside them, and the option that avoids them."""

import collections
import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import ENGINES
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._user_line import user_line

Engine = tuple[str, str]


class Likelihood(nn.Module):
    """The likelihood of ones under normal distributions that a layer gives."""

    def __init__(self, validate_args: bool = True) -> None:  # torch.compile makes False the default
        super().__init__()
        self.layer, self.validate = nn.Linear(8, 8), validate_args

    def forward(self, x: Tensor) -> Tensor:
        mean = self.layer(x)
        likely = torch.distributions.Normal(mean, torch.ones_like(mean), validate_args=self.validate)
        return -likely.log_prob(torch.ones_like(mean)).mean()


class Decoder(nn.Module):
    """A decoder with a causal mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.decoder, self.options = nn.TransformerDecoder(layer, 1), options
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x[None], x[None], tgt_mask=self.mask, **self.options).square().mean()


class Experts(nn.Module):
    """A mixture of experts whose tokens are sorted, as transformers computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        expert, order = torch.sort(self.router(x).argmax(-1))
        ends = (expert[:, None] <= torch.arange(2, device=x.device)).sum(0, dtype=torch.int32)
        return F.grouped_mm(x[order], self.weight, offs=ends).float().square().mean()


def trained(
    engine: Engine, model: nn.Module, loss_fn: Any = lambda model, x: model(x), width: int = 8, policy: Any = None
) -> ampkit.GraphedStep:
    torch.manual_seed(0)
    model.to(engine[0])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=engine[1], cuts=False, policy=policy)
    for _ in range(6):
        step(torch.ones(6, width, device=engine[0]))
    return step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "words", "remedy"),
    [
        (Likelihood, r"checks arguments: pass validate_args=False", {"validate_args": False}),
        (Decoder, r"pass tgt_is_causal \(nn\.TransformerDecoder", {"tgt_is_causal": True}),
    ],
)
def test_what_the_message_advises_is_captured(engine: Engine, kind: Any, words: str, remedy: dict[str, Any]) -> None:
    """The option of the library is named, and with it the step is one graph."""
    with pytest.warns(ampkit.CaptureWarning, match=words):
        trained(engine, kind())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ampkit.CaptureWarning)
        step = trained(engine, kind(**remedy))
    assert step.report().outcome == "whole"


@pytest.mark.parametrize("engine", ENGINES)
def test_grouped_products_are_captured_in_bfloat16(engine: Engine) -> None:
    """Autocast leaves them in float32, where the host reads the sizes of the groups; a rule of the policy does not."""
    with pytest.warns(ampkit.CaptureWarning, match=r'ops={"grouped_mm": "bfloat16"}'):
        trained(engine, Experts(), width=16, policy="bfloat16")
    if engine[0] == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch has a product of groups that reads nothing for some devices alone")
    policy = ampkit.Policy(compute="bfloat16", ops={"grouped_mm": "bfloat16"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ampkit.CaptureWarning)
        step = trained(engine, Experts(), width=16, policy=policy)
    assert step.report().outcome == "whole"


SOMEBODYS = """def scaled(x):
    return x * x.detach().abs().max().item()

import torch

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + float(grad.sum()))

doubled = Doubled.apply

def advance(scheduler):
    scheduler.step()

def fails(x):
    raise ValueError("somebody's")
"""


def package(folder: Path, path: str) -> ModuleType:
    """Return a module of an installed package that waits for the device."""
    file = folder / "site-packages" / path
    file.parent.mkdir(parents=True)
    file.write_text(SOMEBODYS)
    spec = importlib.util.spec_from_file_location("somebodys", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("somebodys.py", r"Keep the value on the device"),
        ("torchmetrics/somebodys.py", r"Update metrics behind the step"),
        ("torch_geometric/utils/loop.py", r"pass add_self_loops=False"),
    ],
)
def test_the_users_own_line_stands_beside_the_packages(tmp_path: Path, path: str, words: str) -> None:
    """A line of an installed package alone does not say where the user's code has called it."""
    scaled = package(tmp_path, path).scaled

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return scaled(model(x)).mean()  # type: ignore[no-any-return]

    line = r"loop\.py|somebodys\.py"
    match = rf"({line}):2: `return x \* .*`, called from .*test_remedies\.py:\d+: `return scaled\(.*` - waits.*{words}"
    with pytest.warns(ampkit.CaptureWarning, match=match):
        trained(("cpu", "emulate"), nn.Linear(8, 8), loss_fn)


@pytest.mark.parametrize("api", ["step", "function"])
def test_it_stands_beside_a_backward_of_the_packages(tmp_path: Path, api: str) -> None:
    """It is the line of the forward, also where the user's function calls the backward itself."""
    doubled, model = package(tmp_path, "somebodys.py").doubled, nn.Linear(8, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return doubled(model(x)).mean()  # type: ignore[no-any-return]

    def train() -> None:
        if api == "step":
            trained(("cpu", "emulate"), model, loss_fn)
            return
        function = ampkit.graphed(modules=(model,), graph="emulate")(lambda x: loss_fn(model, x).backward())
        for _ in range(9):
            function(torch.ones(2, 8))

    match = r"somebodys\.py:13: .*, called from .*test_remedies\.py:\d+: `return doubled\(.*` - waits"
    with pytest.warns(ampkit.CaptureWarning, match=match):
        train()


def test_it_stands_beside_a_packages_line_elsewhere(tmp_path: Path) -> None:
    """Where an error has come from, and in what is said of other things than waits: a scheduler that is stepped."""
    somebodys, model = package(tmp_path, "somebodys.py"), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    @ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph="emulate")
    def function(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        somebodys.advance(scheduler)

    match = r"somebodys\.py:18: `scheduler\.step\(\)`, called from .*test_remedies\.py:\d+: `somebodys\.advance"
    with pytest.warns(ampkit.CaptureWarning, match=match):
        collections.deque((function(torch.ones(2, 8)) for _ in range(9)), maxlen=0)
    with pytest.raises(ValueError, match="somebody's") as raised:
        somebodys.fails(torch.ones(()))
    own = r", called from .*test_remedies\.py:\d+: `somebodys\.fails\(.*`"
    assert re.fullmatch(rf".*somebodys\.py:21: `raise ValueError.*`{own}", user_line(raised.value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, only tensors on CUDA are checked")
def test_find_syncs_shows_both(tmp_path: Path) -> None:
    """The table has the caller below the line."""
    scaled = package(tmp_path, "somebodys.py").scaled
    found = ampkit.debug.find_syncs(lambda: scaled(torch.ones(3)))
    (finding,) = found.findings
    assert "somebodys.py:2" in finding.line
    assert "scaled(torch.ones(3))" in finding.caller
    assert f"called from {finding.caller}" in str(found)
