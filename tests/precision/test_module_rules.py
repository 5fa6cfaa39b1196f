"""Policy(modules=...), apply and remove: what matches, which dtypes result, and that a model stays usable as before."""

import copy
import io
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import DEVICES, ENGINES, assert_same, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit import Policy


class Block(nn.Module):
    """A residual block with a norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """A small transformer without attention, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES: dict[Any, Any] = {nn.LayerNorm: "float32", "head": "float32", r"blocks\.\d+\.mlp": "float16"}
POLICY = Policy(compute="bfloat16", modules=RULES)


def make_net(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return Net().to(device)


def batch(device: str = "cpu") -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {tensor.dtype for tensor in model.state_dict().values()}


def flow(model: nn.Module, policy: Policy, x: Tensor) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return what dtype goes into and comes out of each module that has parameters."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    with policy.autocast(x.device.type):
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("device", DEVICES)
def test_rules_take_effect(device: str) -> None:
    """A11: by class, by path and by regular expression: what a rule says is what the matrix products see."""
    model = POLICY.apply(make_net(device))
    seen: dict[str, torch.dtype] = {}

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is F.linear:
                name = next(name for name, param in model.named_parameters() if param is args[1])
                seen[name] = out.dtype
            return out

    with POLICY.autocast(device), Spy():
        out = model(batch(device))
    assert out.dtype is torch.float32
    assert seen.pop("stem.weight") is torch.bfloat16
    assert seen.pop("head.weight") is torch.float32
    assert {name for name in seen if "mlp" in name} == {f"blocks.{i}.mlp.{j}.weight" for i in (0, 1) for j in (0, 2)}
    assert all(dtype is torch.float16 for name, dtype in seen.items() if "mlp" in name)


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_those_of_casts_by_hand(device: str) -> None:
    """A11: forward and gradients are bitwise those of autocast regions and casts written by hand."""
    x = batch(device)
    model, twin = POLICY.apply(make_net(device)), make_net(device)
    with POLICY.autocast(device):
        out = model(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        h = twin.stem(x) + twin.shift
        for block in twin.blocks:
            with torch.autocast(device, enabled=False):
                normed = block.norm(h.float())
            with torch.autocast(device, dtype=torch.float16, cache_enabled=False):
                h = h + block.mlp(normed.half()).float()
        with torch.autocast(device, enabled=False):
            expected = twin.head(h.float())
    assert_same(out, expected)
    got = torch.autograd.grad(out.square().sum(), tuple(model.parameters()))
    assert_same(got, torch.autograd.grad(expected.square().sum(), tuple(twin.parameters())))
    assert {grad.dtype for grad in got} == {torch.float32}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_low_precision_parameters(name: str, device: str) -> None:
    """A11: without autocast a ruled module has parameters of its dtype, and returns what the code around can take."""
    low = Policy.parse(name).params
    policy = Policy(low, low, low, modules={nn.LayerNorm: "float32", "head": "float32", "blocks.1.mlp": "float16"})
    model = policy.apply(make_net(device))
    kinds = {key: value.dtype for key, value in model.state_dict().items()}
    assert kinds["stem.weight"] is kinds["shift"] is kinds["blocks.0.mlp.0.weight"] is low
    assert kinds["blocks.0.norm.weight"] is kinds["head.bias"] is torch.float32
    assert kinds["blocks.1.mlp.2.weight"] is torch.float16
    seen = flow(model, policy, batch(device).to(low))
    assert seen["blocks.0.mlp.0"] == (low, low)
    assert seen["blocks.1.mlp.0"] == (torch.float16, torch.float16)
    assert model(batch(device).to(low)).dtype is low
    model(batch(device).to(low)).float().sum().backward()
    policy.remove(model)
    assert dtypes(model) == {torch.float32}
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


def test_a_rule_without_autocast_around() -> None:
    """A low rule in a float32 model: inside autocast of that dtype, outside float32 again."""
    policy = Policy(modules={"blocks.0.mlp": "float16"})
    model = policy.apply(make_net())
    seen = flow(model, policy, batch())
    assert seen["blocks.0.mlp.0"] == (torch.float16, torch.float16)
    assert seen["blocks.1.mlp.0"] == (torch.float32, torch.float32)


def test_the_inner_rule_wins_inside() -> None:
    """Rules nest: an inner module follows its own, and what surrounds it takes its output."""
    rules = {"blocks.0": "float32", "blocks.0.mlp": "float16", "blocks.0.mlp.2": "bfloat16"}
    policy = Policy(compute="bfloat16", modules=rules)
    model = policy.apply(make_net())
    seen = flow(model, policy, batch())
    assert seen["blocks.0.norm"] == (torch.float32, torch.float32)
    assert seen["blocks.0.mlp.0"] == (torch.float16, torch.float16)
    assert seen["blocks.0.mlp.2"] == (torch.float16, torch.float32), "bfloat16, widened for float16 autocast around it"
    assert seen["blocks.1.mlp.0"][1] is torch.bfloat16


def test_containers_keyword_arguments_and_other_leaves() -> None:
    """Floating tensors are cast wherever they are in the arguments and results; everything else passes through."""

    class Pair(NamedTuple):
        low: Tensor
        rest: Any

    class Odd(nn.Module):
        def forward(self, items: list[Any], *, extra: dict[str, Any]) -> Pair:
            self.seen = [items[0].dtype, items[1].dtype, extra["x"].dtype, items[2]]
            return Pair(items[0], {"ints": items[1], "double": torch.ones(1).double(), "text": "kept"})

    model = nn.Sequential(Odd())
    policy = Policy(output="bfloat16", modules={"0": "float16"})
    policy.apply(model)
    out = model[0]([torch.ones(1), torch.ones(1).int(), "kept"], extra={"x": torch.ones(1).bfloat16()})
    assert model[0].seen == [torch.float16, torch.int32, torch.float16, "kept"]
    assert type(out) is Pair
    assert (out.low.dtype, out.rest["ints"].dtype, out.rest["double"].dtype) == (
        torch.float32,
        torch.int32,
        torch.float64,
    )
    assert out.rest["text"] == "kept"


def test_outputs_are_cast() -> None:
    """The model's floating outputs come in policy.output, with and without rules."""
    model = Policy(compute="bfloat16", output="float16").apply(make_net())
    assert model(batch()).dtype is torch.float16


@pytest.mark.parametrize("device", DEVICES)
def test_one_weight_in_two_dtypes_meets_no_stale_cache(device: str) -> None:
    """A8: autocast caches by weight, not by dtype; a weight that is used in another dtype too is not served from it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.two.weight = self.three.weight = self.one.weight

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.one(x), self.two(x), self.three(x), self.one(x)

    torch.manual_seed(0)
    model: Any = Tied().to(device)
    policy = Policy(compute="bfloat16", modules={"two": "float16", "three": "float32"})
    policy.apply(model)
    x = batch(device)
    with policy.autocast(device):
        first, low, full, again = model(x)
    weight = model.one.weight
    assert_same(first.bfloat16(), F.linear(x.bfloat16(), weight.bfloat16()))
    assert_same(low, F.linear(x.half(), weight.half()).float())
    assert_same(full, F.linear(x, weight))
    assert_same(again, first)


def test_policies_nest_without_a_stale_cache() -> None:
    """A8: float16 inside of bfloat16 autocast on one weight works, and each sees its own dtype."""
    model, x = nn.Linear(8, 8), batch()
    with Policy.parse("bfloat16").autocast("cpu"):
        before = model(x)
        with Policy.parse("float16").autocast("cpu"):
            assert model(x).dtype is torch.float16
        assert_same(model(x), before)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"hed": "float32"}, r"the rule \"hed\" matches no module. Close paths: 'head'"),
        ({r"blocks\.\d": "float32", r"layers\..*": "float16"}, r"\"layers\\\\\.\.\*\" matches no module. Close paths"),
        ({nn.GroupNorm: "float32"}, r"torch.nn.GroupNorm matches no module. The model has modules of LayerNorm"),
        ({"Head": "float32"}, "Close paths: 'head'"),
    ],
)
def test_a_rule_that_matches_nothing(rules: Any, says: str) -> None:
    """A rule without effect is a ValueError that names close paths; the model is as it was."""
    model = make_net()
    with pytest.raises(ValueError, match=says.replace("\\\\\\\\", "\\\\")):
        Policy(params="bfloat16", compute="bfloat16", modules=rules).apply(model)
    assert type(model) is Net
    assert dtypes(model) == {torch.float32}


@pytest.mark.parametrize(
    ("rules", "both"),
    [
        (
            {nn.LayerNorm: "float32", r"blocks\..*": "float16"},
            ['"blocks\\..*": float16', "torch.nn.LayerNorm: float32"],
        ),
        ({nn.Linear: "float32", nn.Module: "float16"}, ["torch.nn.Linear: float32", "torch.nn.Module: float16"]),
        ({r"he.*": "float32", r".*ad": "float16"}, ['"he.*": float32', '".*ad": float16']),
    ],
)
def test_two_rules_that_disagree(rules: Any, both: list[str]) -> None:
    """An ambiguous match is a ValueError that shows both rules and the module."""
    with pytest.raises(ValueError, match=r"both match module '.*', a (LayerNorm|Linear)") as raised:
        Policy(modules=rules).apply(make_net())
    assert all(rule in str(raised.value) for rule in both)


def test_what_does_not_count_as_ambiguous() -> None:
    """Rules that agree, and the path of one module, which wins over classes and expressions."""
    Policy(modules={nn.Linear: "float16", r"he.*": "float16"}).apply(make_net())
    policy = Policy(compute="bfloat16", modules={nn.LayerNorm: "float32", "blocks.1.norm": "bfloat16"})
    model = policy.apply(make_net())
    seen = flow(model, policy, batch())
    assert seen["blocks.0.norm"][1] is torch.float32
    # A path is a path: its dot does not match any character.
    other = nn.ModuleDict({"a-b": nn.Linear(1, 1), "a": nn.ModuleDict({"b": nn.Linear(1, 1)})})
    Policy(modules={"a.b": "float16"}).apply(other)
    assert type(other["a-b"]) is nn.Linear
    assert type(other["a"]["b"]) is not nn.Linear


def test_subclasses_and_the_model_itself_match() -> None:
    """A class stands for its subclasses, and the root is a module too."""
    Policy(modules={nn.Module: "float16"}).apply(nn.Linear(1, 1))
    model = nn.Linear(1, 1)
    Policy(modules={"": "float16"}).apply(model)
    assert model(torch.ones(1)).dtype is torch.float32
    norms = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm2d(2)])
    Policy(modules={nn.modules.batchnorm._BatchNorm: "float32"}).apply(norms)
    assert all(type(norm).__mro__[1] in (nn.BatchNorm1d, nn.BatchNorm2d) for norm in norms)


def test_a_module_at_two_paths() -> None:
    """A shared module has one rule: paths that disagree raise, and so do surroundings that do."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    with pytest.raises(ValueError, match=r"both match module 'a.0'"):
        Policy(modules={"a.0": "float16", "b.0": "float32"}).apply(model)
    with pytest.raises(ValueError, match=r"'[ab].0' is the same module as 'a.0'.* different rules"):
        Policy("bfloat16", "bfloat16", modules={"a": "float32", "b": "float16"}).apply(model)
    Policy(modules={"b.0": "float16"}).apply(model)
    activation = nn.GELU()  # nothing to decide: it has no rule and no parameters
    model = nn.ModuleDict({"a": nn.Sequential(activation), "b": nn.Sequential(activation)})
    Policy("bfloat16", "bfloat16", modules={"a": "float32", "b": "float16"}).apply(model)
    assert type(activation) is nn.GELU
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ValueError, match=r"b.weight is the same tensor as a.weight, and their rules want float32"):
        Policy("bfloat16", "bfloat16", modules={"b": "float32"}).apply(tied)


def test_modules_that_cannot_have_a_rule() -> None:
    """Where a rule would be bypassed, apply says so instead of installing it."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match=r"module '0' \(Linear\) cannot have a rule: .* forward on the instance"):
        Policy(modules={"0": "float16"}).apply(model)
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # the second in torch 2.15
            warnings.simplefilter("ignore", category)
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"it is scripted"):
        Policy().apply(scripted)
    model = Policy(modules={"0": "float16"}).apply(nn.Sequential(nn.Linear(2, 2)))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    for call in (Policy().apply, Policy(modules={"0": "float16"}).remove):
        with pytest.raises(
            ValueError, match=r"the class of module '0' \(ParametrizedLinear\) was changed after a policy"
        ):
            call(model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    Policy(modules={"0": "float16"}).remove(model)
    assert type(model[0]) is nn.Linear


def test_apply_is_idempotent_and_replaces() -> None:
    """Twice is once; another policy takes the place of the first; remove leaves nothing."""
    model, parameters = make_net(), None
    plain = {name: type(module) for name, module in model.named_modules()}
    low = Policy("bfloat16", "bfloat16", "bfloat16", modules={nn.LayerNorm: "float32"})
    for _ in range(2):
        low.apply(model)
        kinds = {name: type(module) for name, module in model.named_modules()}
        held = [param.data_ptr() for param in model.parameters()]
        assert parameters in (None, (kinds, held))
        parameters = (kinds, held)
    POLICY.apply(model)
    assert dtypes(model) == {torch.float32}
    assert all(plain[name] in type(module).__mro__[:2] for name, module in model.named_modules())
    with pytest.raises(ValueError, match=r"Policy.remove\(Net\): another policy is applied"):
        low.remove(model)
    assert POLICY.remove(model) is model
    assert {name: type(module) for name, module in model.named_modules()} == plain
    assert not [key for module in model.modules() for key in vars(module) if "ampkit" in key]
    with pytest.raises(ValueError, match=r"no policy is applied"):
        POLICY.remove(model)


def test_apply_on_a_part_and_then_on_the_whole() -> None:
    """The whole's policy replaces the part's, and remove still knows the dtypes from the very beginning."""
    model = make_net()
    Policy.parse("16-true").apply(model.blocks)
    whole = Policy.parse("bf16-true")
    whole.apply(model)
    assert dtypes(model) == {torch.bfloat16}
    whole.remove(model)
    assert dtypes(model) == {torch.float32}


def test_an_optimizer_made_before_stays_valid() -> None:
    """Parameters are cast in place: the same objects, which the optimizer goes on to train."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policy = Policy.parse("bf16-true")
    policy.apply(model)
    before = model.head.weight.detach().clone()
    model(batch().bfloat16()).float().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight)


def test_buffers() -> None:
    """Floating buffers go with the parameters of their module; integers, float64 and float32 policies leave them."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.ones(2).double())
    policy = Policy.parse("bf16-true")
    policy.apply(model)
    assert model.running_mean.dtype is torch.bfloat16, "torch takes weights and statistics of one dtype only"
    assert (model.table.dtype, model.num_batches_tracked.dtype) == (torch.float64, torch.int64)
    model(torch.ones(4, 3).bfloat16())
    policy.remove(model)
    Policy("bfloat16", "bfloat16", modules={"": "float32"}).apply(model)
    assert model.running_mean.dtype is torch.float32


def test_looks_like_before() -> None:
    """repr, isinstance, signature, docstring and hooks are those of the module's own class."""
    import inspect

    plain, ruled = make_net(), POLICY.apply(make_net())
    assert repr(ruled) == repr(plain)
    assert isinstance(ruled, Net)
    assert inspect.signature(ruled.forward) == inspect.signature(plain.forward)
    assert type(ruled).__doc__ == Net.__doc__


def clone(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "copy of the parts":
        twin = copy.copy(model)
        twin._modules = {name: clone(module, how) for name, module in model._modules.items()}
        twin._parameters = copy.deepcopy(model._parameters)
        return twin
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    protocol = int(how[-1])
    return pickle.loads(pickle.dumps(model, protocol))


@pytest.mark.parametrize("how", ["deepcopy", "copy of the parts", "pickle 2", "pickle 5", "torch.save"])
def test_copies(how: str) -> None:
    """A copy follows the rules on parameters of its own, can be copied again, and its policy can be removed."""
    model = POLICY.apply(make_net())
    twin = clone(clone(model, how), how)
    with POLICY.autocast("cpu"):
        assert_same(twin(batch()), model(batch()))
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    with torch.no_grad():
        twin.head.weight.zero_()
    assert model.head.weight.abs().sum() > 0
    POLICY.remove(twin)
    assert type(twin) is Net
    assert type(model) is not Net


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.seeds])]
)
def test_compiled_model_follows_its_policy(backend: str, device: str, fresh_dynamo: None) -> None:
    """A11: one compiled model, policies put on in turns: each time what eager computes, in eager's dtype."""
    model = make_net(device)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    other = Policy(compute="bfloat16", output="bfloat16", modules={"head": "float16", nn.LayerNorm: "bfloat16"})
    results = []
    for policy in (POLICY, other, POLICY, other):
        policy.apply(model)
        with policy.autocast(device):
            got, expected = compiled(batch(device)), model(batch(device))
        assert got.dtype is expected.dtype is policy.output
        tolerance = 0.0 if backend == "aot_eager" else 2e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        results.append(got)
    assert_same(results[0], results[2])
    assert not torch.equal(results[0], results[1].float())


@pytest.mark.slow
def test_gradients_of_a_compiled_model(fresh_dynamo: None) -> None:
    """A11: backward through a compiled model is eager's, within the order of sums."""
    model = POLICY.apply(make_net())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (compiled, model):
        with POLICY.autocast("cpu"):
            out = call(batch())
        grads.append(torch.autograd.grad(out.square().sum(), tuple(model.parameters())))
    torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_recomputes_under_the_rules(device: str) -> None:
    """A9: rules are in the modules, so recomputation meets them too, reentrant or not."""
    model, x = POLICY.apply(make_net(device)), batch(device)
    grads = []
    for how in (None, True, False):
        h = x.clone().requires_grad_()
        with POLICY.autocast(device):
            if how is None:
                out = model.blocks[0](h)
            else:
                out = torch.utils.checkpoint.checkpoint(model.blocks[0], h, use_reentrant=how)
        grads.append(torch.autograd.grad(out.float().square().sum(), h) if how is not True else backward(out, h))
    assert_same(grads[1], grads[0])
    assert_same(grads[2], grads[0])


def backward(out: Tensor, leaf: Tensor) -> tuple[Tensor]:
    out.float().square().sum().backward()
    assert leaf.grad is not None
    return (leaf.grad,)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """DDP around the model: the same gradients, and a step sees the policy through the wrapper."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, plain = POLICY.apply(make_net()), POLICY.apply(make_net())
        wrapped = nn.parallel.DistributedDataParallel(model)
        for call in (wrapped, plain):
            with POLICY.autocast("cpu"):
                call(batch()).square().sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, fused=True)
        step = ampkit.graphed_step(
            lambda model, x: model(x).square().mean(), wrapped, optimizer, policy=POLICY, graph="off"
        )
        assert step(batch()).loss > 0
        wrapped.zero_grad()
        del wrapped
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_captured_steps_follow_the_rules(engine: tuple[str, str], compiled: bool, fresh_dynamo: None) -> None:
    """A11: a step replays what eager computes, bit by bit, with rules for modules and for operations."""
    device, graph = engine
    policy = Policy(compute="bfloat16", ops={"gelu": "float32"}, modules=RULES)

    def run(graph: str) -> Any:
        model: Any = policy.apply(make_net(device))
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

        def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            return out.square().mean(), out

        step = ampkit.graphed_step(loss_fn, called, optimizer, policy=policy, graph=graph, on_failure="raise")
        outs = [step(batch(device) + i)._asdict() for i in range(6)]
        assert step.replays == (0 if graph == "off" else 3)
        return outs, model.state_dict()

    with deterministic():
        assert_same(run("off"), run(graph))


def test_a_step_wants_the_rules_on_the_model() -> None:
    """A policy with module rules that nobody applied would silently do nothing."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def make(policy: Policy) -> Any:
        return ampkit.graphed_step(lambda model, x: model(x).sum(), model, optimizer, policy=policy, graph="off")

    with pytest.raises(ValueError, match=r"its module rules are not on the model. Call policy.apply\(model\) first"):
        make(POLICY)
    Policy(compute="bfloat16", modules={"head": "float32"}).apply(model)
    with pytest.raises(ValueError, match=r"follows the rules of another policy"):
        make(POLICY)
    POLICY.apply(model)
    make(POLICY)
    model.head.half()
    with pytest.raises(ValueError, match=r"head.weight is torch.float16, and its rules want torch.float32"):
        make(POLICY)


# Per model: rules, input shape, and how many convolutions and linear layers run in each dtype.
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
MODELS = {
    "resnet18": (
        {nn.BatchNorm2d: "float32", "fc": "float32", r"layer1\..*conv\d": "float16"},
        (2, 3, 32, 32),
        {BF16: 16, F16: 4, F32: 1},
    ),
    "vit_b_16": (
        {nn.LayerNorm: "float32", "heads": "float32", r".*\.mlp": "float16"},
        (1, 3, 224, 224),
        {BF16: 1, F16: 24, F32: 1},
    ),
    "convnext_tiny": (
        {"classifier": "float32", r"features\.1\.\d+\.block\.[35]": "float16"},
        (1, 3, 32, 32),
        {BF16: 52, F16: 6, F32: 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=pytest.mark.seeds) for name in ("convnext_tiny", "vit_b_16"))]
)
def test_torchvision(name: str) -> None:
    """The state_dict goes into the plain model and back, the rules take effect, and remove leaves the plain model."""
    torchvision = pytest.importorskip("torchvision")
    rules, shape, counts = MODELS[name]
    policy = Policy(compute="bfloat16", modules=rules)
    results: Counter[torch.dtype] = Counter()

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func in (F.linear, F.conv2d):
                results[out.dtype] += 1
            return out

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=10)
        for param in made.parameters():
            if not param.any():  # the head of vit_b_16 starts at zero
                nn.init.normal_(param)
        return made.eval()

    plain, model, back = make(0), policy.apply(make(1)), make(2)
    model.load_state_dict(plain.state_dict())
    back.load_state_dict(model.state_dict())
    x = torch.randn(shape)
    with torch.no_grad():
        with policy.autocast("cpu"), Spy():
            assert model(x).dtype is torch.float32
        assert results == counts
        expected = plain(x)
        assert_same(back(x), expected)
        policy.remove(model)
        assert_same(model(x), expected)
    assert list(model.state_dict()) == list(plain.state_dict())
