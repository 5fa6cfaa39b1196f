"""Linear layers in float8: which ones, with torchao's bits, captured as eager, and chosen by timing once."""

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DEVICES, ENGINES, assert_same, deterministic, leave_out_inductor
from tape import taped
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy
from ampkit._errors import AmpkitWarning
from ampkit._precision import float8
from ampkit._precision.float8_layers import PLAIN
from ampkit._precision.module_rules import float8_layers
from ampkit._step.compile import float8_choice, float8_timing
from ampkit._torch.compile import Compiler

torchao = pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'ampkit[float8]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*torchao emulates them")

RECIPES = list(float8.RECIPES)
TENSORWISE, *_ = RECIPES
NAMED = {"blocks.*.mlp": "float8"}


class Attention(nn.Module):
    """Two heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer, which computes its activations again if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1))
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stem = nn.Embedding(48, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return Net().to(device)


def batches(device: str = "cpu", rows: int = 16) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(48, (4, rows), generator=generator).to(device)


def loss_fn(model: Callable[..., Tensor], ids: Tensor, factor: float = 1.0, mask: Tensor | None = None) -> Tensor:
    losses = F.cross_entropy(model(ids).transpose(1, 2).float(), ids, reduction="none").mean(1)
    return (losses.mean() if mask is None else (losses * mask).sum() / mask.sum()) * factor


def step_of(policy: Policy, graph: str = "off", device: str = "cpu", again: bool = False, **options: Any) -> Any:
    model = policy.apply(make_net(device))
    for block in model.blocks:
        block.again = again
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    step = ampkit.graphed_step(
        loss_fn, model, optimizer, policy=policy, graph=graph, on_failure="raise", max_norm=1.0, **options
    )
    return step, model, optimizer


def trained(policy: Policy, graph: str, calls: int = 8, **options: Any) -> tuple[Any, Any]:
    step, model, optimizer = step_of(policy, graph, **options)
    feed = batches(options.get("device", "cpu"))
    losses = [step(next(feed)).loss for _ in range(calls)]
    return step, (losses, model.state_dict(), optimizer.state_dict())


def forms(model: nn.Module) -> dict[str, str]:
    return {path: layer.form for path, layer in float8_layers(model).items()}


def in_float8(model: nn.Module) -> set[str]:
    return {path for path, form in forms(model).items() if form in RECIPES}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("float8", 'params=float32,compute=bfloat16,output=float32,modules={"":float8_tensorwise_if_faster}'),
        ("float8_rowwise", 'params=float32,compute=bfloat16,output=float32,modules={"":float8_rowwise_if_faster}'),
        (
            'params=bfloat16,compute=FLOAT8,modules={"mlp":float8_rowwise_with_gw_hp}',
            'params=bfloat16,compute=bfloat16,output=float32,modules={"":float8_tensorwise_if_faster,'
            '"mlp":float8_rowwise_with_gw_hp}',
        ),
    ],
)
def test_policies_as_text(text: str, written: str) -> None:
    """What a policy prints is what it was parsed from; copies and pickles are equal."""
    policy = Policy.parse(text)
    assert str(policy) == written
    assert Policy.parse(written) == policy == pickle.loads(pickle.dumps(policy))
    assert not policy.needs_scaling


def test_wrong_policies() -> None:
    """Only computing is done in float8, and a rule for the model itself goes with no other one."""
    for options in ({"params": "float8"}, {"output": "float8"}, {"modules": {"mlp": "float8_blockwise"}}):
        with pytest.raises(ValueError, match="expected one of float32, float16, bfloat16"):
            Policy(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"float32 and float8_tensorwise_if_faster for ''. Give it one rule"):
        Policy(compute="float8", modules={"": "float32"})
    with pytest.raises(ValueError, match=r"Write Policy.parse\('bfloat16'\) for float32 parameters"):
        Policy("bfloat16", modules=NAMED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_torchaos(recipe: str) -> None:
    """Forward and gradients are those of the layers that torchao puts in the place of these."""
    model, twin = Policy(compute="bfloat16", modules={"mlp": recipe}).apply(Block()), Block()
    twin.load_state_dict(model.state_dict())
    config = torchao.Float8LinearConfig.from_recipe_name(float8.RECIPES[recipe])
    object.__setattr__(config, "emulate", True)
    torchao.convert_to_float8_training(twin.mlp, config=config)
    for layer in (twin.mlp[0], twin.mlp[2]):  # torchao casts to CUDA's autocast dtype alone
        layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    x = torch.randn(4, 16, 32)
    found = []
    for each in (model, twin, copy.deepcopy(model).eval()):
        each.mlp[3].p = 0.0
        with torch.autocast("cpu", torch.bfloat16):
            out = each(x)
        found.append((out, torch.autograd.grad(out.float().square().sum(), [*each.parameters()])))
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][0], found[2][0])  # evaluation is without float8


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["abs", "mul", "mm", "add"])
def test_rules_for_operations_are_for_the_users(op: str, compiled: bool, fresh_dynamo: None) -> None:
    """torchao calls these operations too, and its arithmetic stays as it is; one for linear would have no effect."""
    x, found = torch.randn(16, 32), []
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU())
    for ops in ({}, {op: "float16"}):
        policy = Policy(compute="bfloat16", modules={"0": "float8"}, ops=ops)
        model: Any = policy.apply(copy.deepcopy(layers))
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with policy.autocast("cpu"):
            out = called(x)
        found.append((out, torch.autograd.grad(out.square().sum(), tuple(model.parameters()))))
    assert_same(*found)
    with pytest.raises(ValueError, match=r"Policy\(ops=\{'linear': float16\}\): a layer in float8 calls no operation"):
        Policy(compute="float8", ops={F.linear: "float16"})


def test_nothing_is_replaced() -> None:
    """Modules, parameters, keys, hooks and the optimizer's references stay; copies and pickles follow the rules."""
    model = make_net()
    modules, params, keys = list(model.modules()), list(model.parameters()), list(model.state_dict())
    calls: list[str] = []
    model.blocks[0].mlp[0].register_forward_hook(lambda *_: calls.append("hook"))
    policy = Policy(compute="bfloat16", modules=NAMED)
    policy.apply(model)
    assert in_float8(model) == {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}
    assert [*map(id, model.modules())] == [*map(id, modules)]
    assert [*map(id, model.parameters())] == [*map(id, params)]
    assert list(model.state_dict()) == keys
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert repr(model.blocks[0].mlp[0]) == "Linear(in_features=32, out_features=64, bias=True)"
    outs = []
    for each in (model, copy.deepcopy(model)):
        torch.manual_seed(3)
        with policy.autocast("cpu"):
            outs.append(each(next(batches())))
    assert calls
    assert_same(*outs)
    model.blocks[0].mlp[0]._forward_hooks.clear()  # a lambda cannot be pickled
    assert in_float8(pickle.loads(pickle.dumps(model))) == in_float8(model)
    policy.remove(model)
    assert type(model.blocks[0].mlp[0]) is nn.Linear


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_the_code_around_gets_what_it_can_take(compute: str) -> None:
    """A layer in float8 is a layer in bfloat16 for what is around it, and evaluation is without float8."""
    policy = Policy(compute=compute, modules=NAMED)
    model, ids = policy.apply(make_net()), next(batches())
    seen = []
    model.blocks[0].mlp[0].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    with policy.autocast("cpu"):
        model(ids).sum().backward()
    assert seen[0][1] is (torch.bfloat16 if compute == "bfloat16" else torch.float32)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    plain = Policy(compute=compute, modules={"blocks.*.mlp.[02]": "bfloat16"}).apply(make_net())
    model.load_state_dict(plain.state_dict())
    with policy.autocast("cpu"):
        assert_same(model.eval()(ids), plain.eval()(ids))


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp[0])


def own_forward(model: Any) -> None:
    layer = model.blocks[0].mlp[0]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)


def pruned(model: Any) -> None:
    del model.blocks[0].mlp[0].weight
    model.blocks[0].mlp[0].weight = torch.zeros(64, 32)


def odd(model: Any) -> None:
    model.blocks[0].mlp[0] = nn.Linear(32, 40)
    model.blocks[0].mlp[2] = nn.Linear(40, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (parametrized, "it is a ParametrizedLinear, whose forward may be another one"),
        (own_forward, "something put a forward on it"),
        (pruned, "its weight is not an ordinary parameter"),
        (odd, "its sizes, 32 and 40, are not multiples of 16"),
    ],
)
def test_layers_that_cannot(change: Callable[[Any], None], reason: str) -> None:
    """They compute as without the rule, with a warning; a rule that no layer can follow is an error."""
    model = make_net()
    change(model)
    with pytest.warns(AmpkitWarning, match=f"no float8 for blocks.0.mlp.0: {reason}"):
        Policy(compute="bfloat16", modules=NAMED).apply(model)
    assert forms(model)["blocks.0.mlp.0"] == PLAIN
    assert "blocks.1.mlp.0" in in_float8(model)
    with pytest.raises(ValueError, match=rf"matches no nn.Linear that can have it. blocks.0.mlp.0: {reason}"):
        Policy(compute="bfloat16", modules={"blocks.0.mlp.0": "float8"}).apply(model)
    with pytest.raises(ValueError, match=r"Policy.apply\(Net\): .* There is none inside."):
        Policy(compute="bfloat16", modules={"embed": "float8"}).apply(make_net())


def test_inner_rules_win() -> None:
    """Also over `compute`. One module at two paths cannot be under two rules."""
    rules = {"blocks.0": "float32", "blocks.0.attention": "float8_rowwise", "blocks.1.mlp.0": "bfloat16"}
    model = Policy(compute="float8", modules=rules).apply(make_net())
    found = forms(model)
    assert {path for path in found if path.startswith("blocks.0")} == {
        "blocks.0.attention.qkv",
        "blocks.0.attention.out",
    }
    assert found["blocks.0.attention.qkv"] == "float8_rowwise"
    assert "blocks.1.mlp.0" not in found
    assert found["blocks.1.mlp.2"] == "float8_tensorwise_if_faster"
    model = make_net()
    model.blocks[1].mlp = model.blocks[0].mlp
    with pytest.raises(ValueError, match="are one module, under different rules"):
        Policy(compute="bfloat16", modules={"blocks.0": "float8"}).apply(model)


@pytest.mark.filterwarnings("ignore:a Linear layer with 64 inputs has a float8 rule, and got 20 rows")
def test_rows_that_are_no_multiple() -> None:
    """They are the inner dimension of the product that makes the weight's gradient."""
    policy = Policy(compute="bfloat16", modules=NAMED)
    model, plain = policy.apply(make_net()), make_net()
    ids = next(batches(rows=5))
    torch.manual_seed(1)
    with policy.autocast("cpu"), pytest.warns(AmpkitWarning, match="32 inputs has a float8 rule, and got 20 rows"):
        out = model(ids)
    torch.manual_seed(1)
    with policy.autocast("cpu"):
        assert_same(out, plain(ids).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_an_overflow_is_seen(recipe: str, wrong: float, device: str) -> None:
    """e4m3 has no infinity: one in a gradient comes out as NaN, in the gradients of input, weight and bias."""
    layer = Policy(compute="bfloat16", modules={"0": recipe}).apply(nn.Sequential(nn.Linear(32, 64)).to(device))
    x = torch.randn(16, 32, device=device, requires_grad=True)
    gradient = torch.randn(16, 64, device=device)
    gradient[3, 5] = wrong
    for grad in torch.autograd.grad(layer(x), (x, *layer.parameters()), gradient):
        assert not grad.isfinite().all()
    scaler = ampkit.GradScaler(device)
    step, model, _ = step_of(Policy(compute="bfloat16", modules={"": recipe}), device=device, scaler=scaler)
    feed = batches(device)
    step(next(feed))
    before, scale = copy.deepcopy(model.state_dict()), float(scaler.get_scale())
    out = step(next(feed), factor=wrong)
    assert bool(out.skipped)
    assert_same(model.state_dict(), before)
    assert float(scaler.get_scale()) == scale / 2


POLICIES = {
    "named": Policy(compute="bfloat16", modules=NAMED),
    "chosen": Policy(compute="float8"),
    "rowwise": Policy(compute="float8_rowwise"),
    "gw_hp": Policy(compute="bfloat16", modules={"blocks": "float8_rowwise_with_gw_hp"}),
    "float16": Policy(compute="float16", modules=NAMED),
    "low": Policy(params="bfloat16", compute="float8"),
}


@pytest.mark.quick(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["plain", "accumulate", "again", "scaler", "taped"])
def test_captured_as_eager(policy: str, how: str) -> None:
    """A step replays what eager computes, bit by bit; a tape shows what a CUDA graph would freeze."""

    def run(graph: str) -> tuple[Any, Any]:
        options: dict[str, Any] = {"accumulate": 2} if how == "accumulate" else {"again": how == "again"}
        options |= {"scaler": ampkit.GradScaler("cpu")} if how == "scaler" else {}
        return trained(POLICIES[policy], graph, 12, **options)

    with deterministic():
        _, expected = run("off")
        with taped() if how == "taped" else nullcontext():
            step, found = run("emulate")
    assert_same(found, expected)
    assert step.replays >= 4
    assert step.report().outcome == "whole"


@pytest.mark.parametrize("recipe", [*RECIPES, "float8_if_faster"])
@pytest.mark.parametrize("engine", ENGINES)
def test_captured_on_each_device(engine: tuple[str, str], recipe: str) -> None:
    """On a GPU these are the products of the hardware. What was chosen by timing there holds for both steps."""
    device, graph = engine
    policy = Policy(compute="bfloat16", modules={"blocks": recipe})
    with deterministic():
        if recipe not in RECIPES:
            policy = trained(policy, "off", 2, device=device)[0].policy
        _, expected = trained(policy, "off", device=device)
        step, found = trained(policy, graph, device=device)
    assert_same(found, expected)
    assert step.replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["named", "chosen"])
def test_compiled(policy: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of layers in float8 are cast from the master weights, so they have no working weights."""
    leave_out_inductor(monkeypatch)
    step, found = trained(POLICIES[policy], "emulate", compile="default")
    _, expected = trained(POLICIES[policy], "off", compile="default")
    assert_same(found, expected)
    report = step.report()
    assert not [line for line in report.compiled if "break" in line or "not compiled" in line]
    model = step._float8._model
    numbers = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    working = {int(name.split()[5]) for name in step._engine._session.fn.gradients if name.startswith("the working")}
    assert {numbers[f"{path}.weight"] for path in in_float8(model)}.isdisjoint(working)
    assert numbers["stem.weight"] in working or policy == "chosen"


def test_around_a_loop_of_ones_own() -> None:
    """Nobody chooses there: the layers compute without float8, and a warning says so."""
    policy = Policy(compute="float8")
    model, plain = policy.apply(make_net()), make_net()
    ids = next(batches())
    with policy.autocast("cpu"):
        assert_same(model.eval()(ids), plain.eval()(ids).float())
        with pytest.warns(AmpkitWarning, match="graphed_step does behind its first call"):
            model.train()(ids)


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    """It computes in float8 what the policy names, bit by bit as in eager training, and refuses to choose."""
    pl = pytest.importorskip("lightning.pytorch")
    harness = pytest.importorskip("lightning_harness")

    class Wide(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_fn(self.net, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)

    def run(policy: Policy, graph: str) -> Any:
        module, feed = Wide(), batches()
        data = torch.utils.data.TensorDataset(torch.cat([next(feed) for _ in range(8)]))
        callback = ampkit.lightning.AmpkitCallback(policy=policy, graph=graph)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        torch.manual_seed(1)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        return module.state_dict()

    with warnings.catch_warnings():
        for text in harness.QUIET:
            warnings.filterwarnings("ignore", text.removeprefix("ignore:"))
        named = Policy(compute="bfloat16", modules={"net.blocks.*.mlp": "float8"})
        plain, expected, found = (
            run(*each) for each in ((Policy.parse("bf16-mixed"), "off"), (named, "off"), (named, "emulate"))
        )
        assert_same(found, expected)
        assert not torch.equal(plain["net.head.weight"], found["net.head.weight"])
        with pytest.raises(
            ValueError, match=r"only graphed_step chooses the layers that compute in float8\. Name them"
        ):
            run(Policy(compute="float8"), "emulate")


class Times(dict[tuple[int, int, int], tuple[float, float] | str]):
    """Milliseconds without float8 and with it, by sizes, that a GPU is said to take; and what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __call__(self, layer: Any, *_: Any) -> tuple[float, float] | str:
        self.asked.append(layer)
        return self.get(layer.sizes, (1.0, 1.0))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Times:
    """The times that layers take; none gains anything as long as there are none here."""
    times = Times()
    monkeypatch.setattr(float8_choice, "times_of", times)
    monkeypatch.setattr(float8_choice, "TIMED_ON", ("cuda", "cpu"))
    return times


QKV, OUT, UP, DOWN = (64, 32, 96), (64, 32, 32), (64, 32, 64), (64, 64, 32)


def test_chosen_by_timing(timed: Times) -> None:
    """Float8 where it gains 3%, each size timed once; with the reason for every layer, and as a policy."""
    timed.update({QKV: (1.0, 0.98), OUT: (1.0, 2.0), UP: (1.0, 0.5), DOWN: "RuntimeError: no kernel"})
    policy = Policy(compute="float8", modules={"blocks.1.attention.qkv": "float8_rowwise"})
    step, model, _ = step_of(policy)
    assert (step.policy, step.state_dict()) == (policy, {})
    assert "float8: nothing is chosen before the first call" in str(step.report())
    step(next(batches()))
    assert in_float8(model) == {"blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.1.attention.qkv"}
    assert "float8: 3 of 10 Linear layers with a rule" in str(step.report())
    assert [each.sizes for each in timed.asked] == [QKV, OUT, UP, DOWN]
    assert [each.bias for each in timed.asked] == [False, True, True, True]
    assert str(step.policy) == (
        'params=float32,compute=bfloat16,output=float32,modules={"blocks.0.mlp.0":float8_tensorwise,'
        '"blocks.1.attention.qkv":float8_rowwise,"blocks.1.mlp.0":float8_tensorwise}'
    )
    reasons = {path: layer.reason for path, layer in float8_layers(model).items()}
    assert reasons["stem"] == "it is the first Linear layer"
    assert reasons["head"] == "it is the last Linear layer, the head"
    assert reasons["blocks.0.mlp.0"] == "2.00 times as fast in float8"
    assert reasons["blocks.0.mlp.2"] == "it could not be timed: RuntimeError: no kernel"
    table = str(ampkit.explain(model, next(batches()), policy=policy, device_type="cpu"))
    rows = [line.split() for line in table.splitlines()]
    row = "blocks.*.mlp.0 float8_tensorwise 2.00 times as fast in float8 64 x 32 x 64 1.000 0.500"
    assert row.split() in rows
    policy.apply(model)
    named, other, _ = step_of(step.policy)
    assert in_float8(model) == in_float8(other) == {"blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.1.attention.qkv"}
    named.load_state_dict(step.state_dict())
    assert (named.policy, named.state_dict()) == (step.policy, {})


def test_a_choice_for_a_layer_that_was_replaced(timed: Times) -> None:
    """It is refused: the layer that is there now is none that computes in float8."""
    timed.update({UP: (1.0, 0.5)})
    step, _, _ = step_of(Policy(compute="float8"))
    step(next(batches()))
    timed.clear()
    other, model, _ = step_of(Policy(compute="float8"))
    model.blocks[0].mlp[0] = nn.Sequential(model.blocks[0].mlp[0])
    with pytest.raises(ValueError, match=r"blocks.0.mlp.0 was an nn.Linear .* and is a Sequential now"):
        other.load_state_dict(step.state_dict())


def test_the_first_call_chooses(timed: Times) -> None:
    """It computes without float8 itself."""
    timed.update({UP: (1.0, 0.5)})
    found = []
    for policy in (Policy(compute="float8"), Policy(compute="bfloat16")):
        step, model, _ = step_of(policy)
        ids = next(batches())
        found.append((step(ids)._asdict(), copy.deepcopy(model.state_dict()), step(ids).loss))
    assert_same(found[0][:2], found[1][:2])
    assert not torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_choice_lasts(graph: str, timed: Times) -> None:
    """E1: a run that goes on from a checkpoint computes as before, though the times would be others."""
    timed.update({UP: (1.0, 0.5)})
    policy, feed = Policy(compute="float8"), batches()
    step, model, optimizer = step_of(policy, graph)
    for _ in range(6):
        step(next(feed))
    saved = copy.deepcopy([step.state_dict(), model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    timed.update({UP: (1.0, 2.0), DOWN: (1.0, 0.5)})
    left = [next(feed) for _ in range(6)]
    expected = [step(ids).loss for ids in left]
    resumed, other, others = step_of(policy, graph)
    for each, state in zip((resumed, other, others), saved, strict=False):
        each.load_state_dict(state)
    torch.set_rng_state(saved[3])
    assert_same([resumed(ids).loss for ids in left], expected)
    assert_same(other.state_dict(), model.state_dict())
    assert resumed.policy == step.policy
    assert resumed.state_dict() == step.state_dict()
    with pytest.raises(ValueError, match="has a choice for 10 layers under float8 rules, and this model has 0"):
        step_of(Policy(compute="bfloat16"))[0].load_state_dict(saved[0])
    saved[0]["float8"]["stem"][0] = "float8_of_tomorrow"
    with pytest.raises(ValueError, match="they differ in stem"):
        step_of(policy)[0].load_state_dict(saved[0])


def test_nothing_chosen_lasts_too(timed: Times) -> None:
    """A choice of no layer at all is a choice."""
    step, model, _ = step_of(Policy(compute="float8"))
    step(next(batches()))
    assert not in_float8(model)
    timed.update({UP: (1.0, 0.5)})
    resumed, other, _ = step_of(Policy(compute="float8"))
    resumed.load_state_dict(step.state_dict())
    resumed(next(batches()))
    assert not in_float8(other)
    assert resumed.policy == Policy(compute="bfloat16")


@pytest.mark.parametrize("how", ["scan", "window", "buckets"])
def test_other_ways_to_call(how: str, timed: Times) -> None:
    """The first of several calls at once chooses; what looks for padding says nothing of layers without a choice."""
    timed.update({UP: (1.0, 0.5)})
    options: dict[str, Any] = {"accumulate": 4} if how == "window" else {}
    options |= {"buckets": ampkit.Buckets(batch=(4, 8))} if how == "buckets" else {}
    found = []
    for graph in ("off", "emulate"):
        step, model, _ = step_of(Policy(compute="float8"), graph, **options)
        feed = batches()
        for _ in range(6):
            if how == "buckets":
                step(next(feed)[:3])
            else:
                (step.scan if how == "scan" else step.window)(torch.stack([next(feed) for _ in range(4)]))
        assert in_float8(model) == {"blocks.0.mlp.0", "blocks.1.mlp.0"}
        found.append(model.state_dict())
    assert_same(*found)


def test_compiled_by_the_user(fresh_dynamo: None) -> None:
    """Rules are traced into one graph, with the bits of eager."""
    policy = Policy(compute="bfloat16", modules=NAMED)
    grads = []
    for compiled in (False, True):
        model: Any = policy.apply(make_net())
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for block in model.blocks:
            block.mlp[3].p = 0.0  # compiled code draws in another order
        with policy.autocast("cpu"):
            loss_fn(called, next(batches())).backward()
        grads.append([param.grad for param in model.parameters()])
    assert_same(*grads)


def test_a_loaded_choice_replaces_another(timed: Times) -> None:
    """Graphs of the one that there was are given up."""
    timed.update({UP: (1.0, 0.5)})
    chosen = step_of(Policy(compute="float8"))[0]
    chosen(next(batches()))
    timed.update({UP: (1.0, 1.0), DOWN: (1.0, 0.5)})
    found = []
    for graph in ("off", "emulate"):
        step, model, _ = step_of(Policy(compute="float8"), graph)
        feed = batches()
        for call in range(12):
            if call == 6:
                step.load_state_dict(chosen.state_dict())
            step(next(feed))
        assert in_float8(model) == {"blocks.0.mlp.0", "blocks.1.mlp.0"}
        found.append(model.state_dict())
    assert_same(*found)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed(dtype: torch.dtype, compiled: bool, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of each form, on numbers that no generator of the training gives."""
    leave_out_inductor(monkeypatch)
    compiler = Compiler({}) if compiled else None
    ran: list[Any] = []

    def runs_twice(runs: Any, device: Any) -> list[float]:
        return [ran.append((run(), run())) or float(len(ran)) for run in runs]

    monkeypatch.setattr(float8_timing, "_ms_in_turns", runs_twice)
    state = torch.get_rng_state()
    for bias in (False, True):
        layer = float8_timing.TimedLayer(TENSORWISE, (64, 32, 48), bias, dtype)
        assert float8_timing.times_of(layer, torch.device("cpu"), compiler) == (len(ran) - 1, len(ran))
    assert (len(ran), compiler is not None and compiler.graphs) == (4, 4 if compiled else False)
    assert torch.equal(torch.get_rng_state(), state)

    def fails(*_: Any) -> float:
        raise torch.OutOfMemoryError("no memory\nat all")

    monkeypatch.setattr(float8_timing, "_ms_in_turns", fails)
    assert float8_timing.times_of(layer, torch.device("cpu"), None) == "OutOfMemoryError: no memory"


@pytest.mark.cuda
def test_times_on_a_gpu() -> None:
    """Both forms of a layer run, and take some time."""
    for sizes in ((16384, 4096, 14336), (256, 256, 256)):
        layer = float8_timing.TimedLayer(TENSORWISE, sizes, False, torch.float32)
        times = float8_timing.times_of(layer, torch.device("cuda"), None)
        assert isinstance(times, tuple), times
        assert min(times) > 0


def test_layers_that_the_first_call_left_alone(timed: Times) -> None:
    """They stay without float8, as do those with a number of rows that float8 does not take."""
    timed.update({UP: (1.0, 0.5), (20, 32, 64): (1.0, 0.5)})
    step, model, _ = step_of(Policy(compute="float8"))
    model.blocks[1].eval()
    step(next(batches()))
    assert in_float8(model) == {"blocks.0.mlp.0"}
    assert (
        float8_layers(model)["blocks.1.mlp.0"].reason
        == "the first call did not call it in training mode, or in compiled code"
    )
    step, model, _ = step_of(Policy(compute="float8"))
    step(next(batches(rows=5)))
    assert float8_layers(model)["blocks.0.mlp.0"].reason == "it gets 20 rows, no multiple of 16"


def test_a_device_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compute` falls back with a warning; layers that are named are an error."""
    monkeypatch.setattr(float8_choice, "why_not_on", lambda device: "it is old")
    with pytest.raises(ValueError, match=r"blocks.0.mlp.0 is to compute in float8, but it is old. Leave out the rule"):
        step_of(POLICIES["named"])
    with pytest.warns(AmpkitWarning, match="no layer computes in float8: it is old"):
        step, model, _ = step_of(POLICIES["chosen"])
    out = step(next(batches()))
    assert_same(out._asdict(), step_of(Policy(compute="bfloat16"))[0](next(batches()))._asdict())
    assert not in_float8(model)
    assert step.policy == Policy(compute="bfloat16")
    state = {"float8": {path: [TENSORWISE, "", None, None] for path in forms(model)}}
    with pytest.raises(ValueError, match="layers were chosen to compute in float8, but it is old"):
        step.load_state_dict(state)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_capability(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada has the first float8 tensor cores."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "this GPU")
    problem = float8.why_not_on(torch.device("cuda"))
    says = "this GPU has compute capability 8.0, and float8 needs 8.9 or more"
    assert problem == ("" if capability == (9, 0) else says)
    assert float8.why_not_on(torch.device("mps")) == "there is no float8 on mps"


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error, or the warning, has the command that installs it."""
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    float8.float8_forward.cache_clear()
    try:
        with pytest.raises(
            ImportError, match=r"float8_tensorwise needs torchao 0.18 .*: pip install 'ampkit\[float8\]'"
        ):
            POLICIES["named"].apply(make_net())
        with pytest.warns(
            AmpkitWarning, match=r"no float8 for blocks.0.attention.qkv: .*pip install 'ampkit\[float8\]'"
        ):
            model = POLICIES["chosen"].apply(make_net())
        assert set(forms(model).values()) == {PLAIN}
    finally:
        float8.float8_forward.cache_clear()


def test_wrapped_models(tmp_path: Path, timed: Times) -> None:
    """DDP and fully_shard around the model: a step finds the layers inside, with the bits of the model alone."""
    timed.update({UP: (1.0, 0.5)})
    policy = Policy(compute="float8")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for wrap in (lambda model: model, nn.parallel.DistributedDataParallel, fully_shard):
            model = policy.apply(make_net())
            wrapped = wrap(model)
            optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
            step = ampkit.graphed_step(loss_fn, wrapped, optimizer, policy=policy, graph="off")
            feed = batches()
            found.append([step(next(feed)).loss for _ in range(4)])
            assert in_float8(model) == {"blocks.0.mlp.0", "blocks.1.mlp.0"}
            step.close()
            del wrapped, step, optimizer
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])
    finally:
        torch.distributed.destroy_process_group()


_RANK = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
sys.path[:0] = [{support!r}, {tests!r}]
import test_float8 as t
from ampkit._step.compile import float8_choice, float8_timing
from ampkit._torch.compile import Compiler
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", "file://{store}", rank=rank, world_size=2)
asked = []
float8_choice.TIMED_ON = ("cpu",)
float8_choice.times_of = lambda layer, *_: asked.append(layer) or ((1.0, 0.5) if layer.sizes == t.UP else (1.0, 1.0))
policy = t.Policy(compute="float8")
model = policy.apply(t.make_net())
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2, fused=True)
step = t.ampkit.graphed_step(t.loss_fn, ddp, optimizer, policy=policy, graph="emulate")
feed = t.batches()
for _ in range(9):
    step(next(feed))
total = float(sum(param.double().sum() for param in model.parameters()))
print(rank, len(asked), sorted(t.in_float8(model)), step.replays > 0, total)
step.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_the_first_rank_decides(tmp_path: Path) -> None:
    """The other one times nothing, and takes over what it is told."""
    here = Path(__file__).parent
    code = _RANK.format(support=str(here.parent / "support"), tests=str(here), store=tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=100)[0].split(maxsplit=2) for rank in ranks]
    assert [words[:2] for words in said] == [["0", "4"], ["1", "0"]]
    assert said[0][2] == said[1][2]
    assert said[0][2].startswith("['blocks.0.mlp.0', 'blocks.1.mlp.0'] True")
