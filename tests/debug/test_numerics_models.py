"""debug.numerics on models with odd parts: they train the same bits with it as without, and nothing outlives a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchmetrics.classification import MulticlassAccuracy

import ampkit

Engine = tuple[str, str]
WIDTH = 16


class WithMetric(nn.Module):
    """A metric of torchmetrics, whose hash is of its state, which each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.accuracy = nn.Linear(WIDTH, 4), MulticlassAccuracy(4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        with torch.no_grad():
            self.accuracy(scores.float(), x.float().argmax(1) % 4)
        return scores


class Mapped(nn.Module):
    """Calls a module under torch.vmap and torch.func.grad, whose tensors have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.vmap(self.body)(x)
        slope = torch.func.grad(lambda z: self.head(z).float().sum())(x)
        return self.head(hidden) + slope.to(hidden.dtype).mean()


class FrozenEncoder(nn.Module):
    """An encoder in eval mode with a padding mask, which hands nested tensors from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 2, WIDTH)
        mask = torch.tensor([False, True]).expand(tokens.shape[:2])
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            encoded = self.encoder(tokens, src_key_padding_mask=mask)
        return self.head(encoded[:, 0])


class Negated(nn.Module):
    """A module whose input is a view with the negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH // 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.view_as_complex(x.view(-1, WIDTH // 2, 2)).conj().imag)


class Selective(nn.Module):
    """Checkpointing that keeps the results of some operations, in the order in which they come."""

    KEPT = (torch.ops.aten._to_copy.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, list(self.KEPT))
        return checkpoint(self.body, x, use_reentrant=False, context_fn=kept)


def train(model: nn.Module, graph: str, watched: bool, policy: str | None = "float32", device: str = "cpu") -> Any:
    """Return the weights after six steps, each observed, and what watched them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    watch = ampkit.debug.numerics(model, every=1) if watched else None
    step = ampkit.graphed_step(
        lambda net, x: net(x).float().square().mean(), model, optimizer, policy=policy, numerics=watch, graph=graph
    )
    made = torch.Generator().manual_seed(0)
    for _ in range(6):
        step(torch.randn(8, WIDTH, generator=made).to(device))
    return {name: param.detach().clone() for name, param in model.named_parameters()}, watch


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*there are nested tensors, and torch cannot record:ampkit.CaptureWarning")
@pytest.mark.parametrize("graph", ["emulate", "off"])
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [WithMetric, Mapped, FrozenEncoder, Negated, Selective])
def test_odd_parts(build: Callable[[], nn.Module], policy: str, graph: str) -> None:
    """What cannot be measured is left out; the rest is, and no bit changes."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        end, watch = train(build(), graph if build is not WithMetric else "off", watched, policy)
        ends.append(end)
    assert_same(*ends)
    trained = {name for name, param in build().named_parameters() if param.requires_grad}
    assert {row.name for row in watch.report().rows if row.what == "gradient"} == trained
    assert watch.report().observed == 6


class Deep(nn.Module):
    """Checkpointed blocks, whose recomputation checkpointing ends by an error within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_checkpointing_keeps_nothing(engine: Engine) -> None:
    """A9: behind an observed step no module is held open, with the graph of what was recomputed."""
    device, graph = engine
    torch.manual_seed(0)
    with deterministic():
        _, watch = train(Deep().to(device), graph, True, device=device)
    assert watch.report().observed == 6
    assert not watch._hooks._open_calls


def test_a_forward_that_raises_keeps_nothing() -> None:
    """The graph up to there goes with the error."""

    class Raising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raising(WIDTH, 4))
    watch = ampkit.debug.numerics(model, every=1)
    with watch, pytest.raises(ZeroDivisionError):
        model(torch.randn(2, WIDTH))
    assert not watch._hooks._open_calls


class Masked(nn.Module):
    """Attention that is handed a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 2, WIDTH), src_mask=self.mask))


class EightBits(nn.Module):
    """A layer whose weight is kept in an eight-bit format, and cast where it is used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_parameters_of_eight_bits(engine: Engine, dtype: torch.dtype) -> None:
    """Their magnitudes are measured as float32, for torch has no norm of them; one that is not finite is named."""
    device, graph = engine
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        with deterministic():
            model = nn.Sequential(EightBits(dtype), nn.Linear(WIDTH, 4)).to(device)
            end, watch = train(model, graph, watched, None, device)
        end["0.weight"] = end["0.weight"].float()
        ends.append(end)
    assert_same(*ends)
    assert watch.report().observed == 6

    model[0].weight.view(torch.uint8)[0, 0] = 0x7F  # nan in both formats
    with ampkit.debug.numerics(model, every=1) as watch:
        model(torch.ones(2, WIDTH, device=device)).sum().backward()
        watch.step()
    found = watch.report().first_overflow
    assert found is not None
    assert (found.name, found.what) == ("0", "output")
    assert "; 0.weight is not finite itself" in found.detail


def test_packed_formats_are_left_out() -> None:
    """Of float4, two to a byte, torch casts nothing: such a parameter is not measured, the others are."""
    model = nn.Linear(WIDTH, 4)
    packed = torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
    with ampkit.debug.numerics(model, every=1) as watch:
        model(torch.ones(2, WIDTH)).sum().backward()
        watch.step()
    assert {row.name for row in watch.report().rows if row.what == "gradient"} == {"weight", "bias"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_mask_is_no_overflow(engine: Engine) -> None:
    """A first step that overflows by its scale is not blamed on inf that finite steps have as well."""
    device, graph = engine
    torch.manual_seed(0)
    model = Masked().to(device)
    watch = ampkit.debug.numerics(model, every=2)
    step = ampkit.graphed_step(
        lambda net, x: net(x).float().square().mean(),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        policy="float16",
        scaler=ampkit.GradScaler(device, init_scale=2.0**24),
        numerics=watch,
        graph=graph,
    )
    x = torch.randn(8, WIDTH, device=device)
    for _ in range(24):
        step(x)
    assert 0 < step.skipped < 24
    found = watch.report().first_overflow
    assert found is not None
    assert (found.direction, found.step) == ("backward", 0)
    assert "input" not in found.what


def test_skips_before_a_resume_are_no_alarm() -> None:
    """A count of skipped steps that a checkpoint brought along is where counting begins."""
    model = nn.Linear(WIDTH, 4)
    scaler = ampkit.GradScaler("cpu", init_scale=2.0)
    scaler.materialize(torch.device("cpu"))
    scaler.load_state_dict({**scaler.state_dict(), "skipped": 30})
    assert int(scaler.skipped) == 30
    watch = ampkit.debug.numerics(model, every=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(
        lambda net, x: net(x).float().square().mean(),
        model,
        optimizer,
        policy="float16",
        scaler=scaler,
        numerics=watch,
        graph="emulate",
    )
    for _ in range(8):
        step(torch.ones(2, WIDTH))
    assert watch.report().observed == 1
