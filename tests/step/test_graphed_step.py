"""graphed_step: bitwise the eager steps, captures and replays counted, outputs that stay, rates, stale graphs."""

import copy
import itertools
import json
import re
from collections import OrderedDict, deque
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from families import every
from harness import (
    ENGINES,
    OPTIMIZERS,
    UNFUSED,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    no_sync,
    skip_without_kernel,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import ampkit

Engine = tuple[str, str]


def make(engine: Engine, optimizer: str = "adamw", **options: Any) -> tuple[ampkit.GraphedStep, nn.Module, Any]:
    device, graph = engine
    model = options.pop("model", None) or make_net(device)
    opt = OPTIMIZERS[optimizer](model.parameters())
    options = {"policy": "float32", "graph": graph, "on_failure": "raise", **options}
    return ampkit.graphed_step(options.pop("loss_fn", boosted_loss), model, opt, **options), model, opt


def trajectory(engine: Engine, policy: str, optimizer: str, max_norm: float | None, schedule: bool) -> list[Any]:
    """Return the state after each of 14 calls: overflows before and after capture, two shapes, a changed rate."""
    device, graph = engine
    skip_without_kernel(device, optimizer)
    model = make_net(device)
    opt = (OPTIMIZERS | UNFUSED)[optimizer](model.parameters())
    scaler = ampkit.GradScaler(device, init_scale=1024.0, growth_interval=3, enabled=policy == "float16")
    step = ampkit.graphed_step(
        boosted_loss,
        model,
        opt,
        policy=policy,
        scaler=scaler,
        max_norm=max_norm,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20) if schedule else None,
        graph=graph,
        on_failure="raise",
    )
    overflows = (1, 10) if policy == "float16" else ()
    batches = make_batches(device, [16] * 6 + [7] * 5 + [16] * 3, overflows)
    torch.manual_seed(5)
    history = []
    for i, batch in enumerate(batches):
        if i == 12:
            opt.param_groups[0]["lr"] = 0.003
        out = step(*batch)
        history.append((training_state(model, opt, scaler), out._asdict()))
    if graph != "off":
        assert (step.captures, step.replays) == (2, 8)
        assert step.report().eager == {"warm-up": 6}
    assert step.skipped == len(overflows)
    return history


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("policy", "max_norm"), [("float32", None), ("bfloat16", 0.5), ("float16", None), ("float16", 0.5)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.sampled(10)
def test_bitwise_equal_to_eager(
    engine: Engine, policy: str, max_norm: float | None, optimizer: str, schedule: bool
) -> None:
    """S1, G5: after every call parameters, buffers, moments, scale, rate, random state, outputs are eager's bits."""
    with deterministic():
        eager = trajectory((engine[0], "off"), policy, optimizer, max_norm, schedule)
        graphed = trajectory(engine, policy, optimizer, max_norm, schedule)
    for i, (left, right) in enumerate(zip(eager, graphed, strict=True)):
        assert_same(left, right, f"after call {i}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "max_norm"), [("float32", None), ("float16", 0.5)])
@pytest.mark.parametrize("optimizer", every(3, UNFUSED))
@pytest.mark.sampled(8)
def test_optimizers_without_a_fused_kernel(engine: Engine, policy: str, max_norm: float | None, optimizer: str) -> None:
    """S1, G7: optimizers with torch's defaults are captured too, with eager's bits, skips and schedule included."""
    with deterministic():
        eager = trajectory((engine[0], "off"), policy, optimizer, max_norm, schedule=True)
        graphed = trajectory(engine, policy, optimizer, max_norm, schedule=True)
    for i, (left, right) in enumerate(zip(eager, graphed, strict=True)):
        assert_same(left, right, f"after call {i}")


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_a_loop_written_with_torch(engine: Engine) -> None:
    """S1: within float32 rounding the step is torch's own autocast, scale, unscale, clip, step, update."""
    batches = make_batches(engine[0], [16] * 8)
    step, model, _ = make(engine, "sgd", policy="bfloat16", max_norm=0.5, scaler=ampkit.GradScaler(engine[0], 256.0))
    with deterministic():
        torch.manual_seed(5)
        for batch in batches:
            step(*batch)
        reference = make_net(engine[0])
        optimizer = OPTIMIZERS["sgd"](reference.parameters())
        scaler = torch.amp.GradScaler(engine[0], 256.0)
        torch.manual_seed(5)
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(engine[0], dtype=torch.bfloat16):
                loss, _ = boosted_loss(reference, *batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_norm_is_summed_in_the_order_of_the_model(engine: Engine) -> None:
    """W7: param groups in another order than the model, as those without weight decay, change no bit of the norm."""
    device, graph = engine

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        blocks = ([nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh()] for _ in range(8))
        model = nn.Sequential(*(layer for block in blocks for layer in block)).to(device)
        norms = [param for layer in model if isinstance(layer, nn.LayerNorm) for param in layer.parameters()]
        rest = [param for layer in model if isinstance(layer, nn.Linear) for param in layer.parameters()]
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.125}]
        return model, torch.optim.SGD(groups, lr=2**-6, fused=True)

    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)).to(device) for i in range(8)]
    with deterministic():
        model, optimizer = made()
        expected = []
        for x in batches:
            model(x).square().sum().backward()
            expected.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
            optimizer.step()
            optimizer.zero_grad()
        for each in ("off", graph):
            step = ampkit.graphed_step(
                lambda model, x: model(x).square().sum(), *made(), max_norm=float("inf"), graph=each, on_failure="eager"
            )
            assert_same([step(x).grad_norm for x in batches], expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("rate", [0.1 / 3, 2.0**-6])
@pytest.mark.quick(2)
def test_the_bits_of_a_loop_written_with_torch(engine: Engine, optimizer: str, rate: float) -> None:
    """Without clipping, and with the rate that the documentation names, the step has the bits of torch's own loop."""
    device, graph = engine
    batches = make_batches(device, [16] * 8)
    kind = getattr(torch.optim, optimizer)
    given = torch.tensor(rate, device=device) if device == "cuda" and rate != 2.0**-6 else rate
    ours, theirs = make_net(device), make_net(device)
    step = ampkit.graphed_step(
        boosted_loss, ours, kind(ours.parameters(), lr=rate, fused=True), policy="bfloat16", graph=graph
    )
    reference = kind(theirs.parameters(), lr=given, fused=True)
    with deterministic():
        torch.manual_seed(5)
        for batch in batches:
            step(*batch)
        torch.manual_seed(5)
        for batch in batches:
            reference.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss, _ = boosted_loss(theirs, *batch)
            loss.backward()
            reference.step()
    assert step.replays == 5
    assert_same(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_no_views_of_inputs_or_of_each_other(engine: Engine) -> None:
    """Each output is a copy of its own in every call, warm-up and replay alike, as the documentation says."""

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return model(x).square().mean(), (x, x[:1])

    step, _, _ = make(engine, "sgd", model=nn.Linear(3, 3).to(engine[0]), loss_fn=loss_fn)
    x = torch.ones(2, 3, device=engine[0])
    for _ in range(6):
        whole, first = step(x).aux
        first.zero_()
        assert (int(whole.sum()), int(x.sum())) == (6, 6)
    assert step.replays == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_never_overwritten(engine: Engine) -> None:
    """What a call returned keeps its values while later calls replay, and aux keeps its tree."""
    step, _, _ = make(engine, policy="float16", max_norm=1.0)
    kept, values = [], []
    for batch in make_batches(engine[0], [16] * 10, overflow_at=(6,)):
        out = step(*batch)
        kept.append(out)
        values.append(copy.deepcopy(out._asdict()))
    for out, value in zip(kept, values, strict=True):
        assert_same(out._asdict(), value)
    assert [bool(out.skipped) for out in kept] == [i == 6 for i in range(10)]
    assert len({float(out.loss) for out in kept if not out.skipped}) == 9
    assert kept[0].aux["correct"].shape == ()
    assert all(out.loss.dtype is torch.float32 and not out.loss.requires_grad for out in kept)


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_may_be_trees(engine: Engine) -> None:
    """A dict batch and keyword arguments reach loss_fn as they were passed, from the static buffers too."""

    def loss_fn(model: nn.Module, batch: dict[str, Any], *, weight: Tensor, mean: bool) -> Tensor:
        losses = F.cross_entropy(model(batch["image"]), batch["label"], reduction="none") * weight
        return losses.mean() if mean else losses.sum()

    step, _, _ = make(engine, loss_fn=loss_fn)
    images, labels, _ = make_batches(engine[0], [8])[0]
    weight = torch.rand(8, device=engine[0])
    for _ in range(6):
        step({"image": images, "label": labels}, weight=weight, mean=True)
    assert step.replays == 3
    zero = step({"image": images, "label": labels}, weight=torch.zeros_like(weight), mean=True)
    assert zero.loss == 0.0
    for _ in range(4):
        step({"image": images, "label": labels}, weight=weight, mean=False)
    assert (step.captures, step.replays) == (2, 5)
    assert [graph.layout.endswith(end) for graph, end in zip(step.report().per_graph, ("True", "False"), strict=True)]


@pytest.mark.parametrize("api", ["graphed_step", "graphed"])
@pytest.mark.parametrize("graph", ["off", "replayed", "told"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.quick(3)
def test_what_the_loss_does_to_containers_stays_inside(engine: Engine, graph: str, api: str) -> None:
    """A replay cannot take an entry out of the user's batch, so no call does. A call that is made twice finds it."""
    device, told = engine[0], graph == "told"
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if told and not torch.cuda.is_current_stream_capturing():
            model.weight.sum().item()
        targets = batch["rest"].pop()
        batch["rest"].insert(0, None)
        batch["ordered"]["more"] = targets
        batch["deque"].append(targets)
        return F.mse_loss(model(batch.pop("inputs")), targets)

    def train(batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    options: Any = {"graph": "off" if graph == "off" else engine[1], "on_failure": "raise"}
    if api == "graphed_step":
        step: Any = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    else:
        step = ampkit.graphed(modules=(model,), optimizers=(optimizer,), **options)(train)
    with pytest.warns(ampkit.CaptureWarning, match="is_current_stream_capturing") if told else nullcontext():
        for _ in range(6):
            inputs, targets = torch.randn(2, 8, 4, device=device).unbind()
            batch = {
                "inputs": inputs,
                "rest": [1, targets],
                "ordered": OrderedDict(a=1),
                "deque": deque([2], 3),
                "named": Pair(1, {"b": 2}),
            }
            before = copy.copy(batch) | {"rest": [*batch["rest"]], "ordered": OrderedDict(a=1), "deque": deque([2], 3)}
            step(batch)
            assert list(batch) == list(before)
            assert all(a is b for a, b in zip(batch["rest"], before["rest"], strict=True))
            assert (batch["ordered"], batch["deque"]) == (before["ordered"], before["deque"])
    assert step.replays == {"off": 0, "replayed": 3, "told": 2}[graph]


class Pair(NamedTuple):
    one: int
    other: dict[str, int]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["float", "tensor on the host", "tensor on the device", "one element"])
@pytest.mark.quick(2)
def test_learning_rate_takes_effect_in_the_next_step(engine: Engine, kind: str) -> None:
    """A rate that the user assigns is not frozen in the graph, and stays what the user assigned."""
    step, model, optimizer = make(engine, "sgd")
    for batch in make_batches(engine[0], [16] * 5):
        step(*batch)
    assert step.replays == 2
    before = copy.deepcopy(dict(model.named_parameters()))
    rate = {
        "float": 0.0,
        "tensor on the host": torch.tensor(0.0),
        "tensor on the device": torch.tensor(0.0, device=engine[0]),
        "one element": torch.zeros(1, device=engine[0]),
    }[kind]
    optimizer.param_groups[0]["lr"] = rate
    step(*make_batches(engine[0], [16])[0])
    assert step.replays == 3
    assert_same(before, dict(model.named_parameters()))
    assert optimizer.param_groups[0]["lr"] is rate
    if isinstance(rate, Tensor):
        rate.fill_(0.1)
        step(*make_batches(engine[0], [16])[0])
        assert not torch.equal(before["head.weight"], model.head.weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_keep_their_own_rates(engine: Engine) -> None:
    """Each param group has a rate of its own, in the graph too."""
    model = make_net(engine[0])
    groups = [{"params": model.conv.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, fused=True)
    step = ampkit.graphed_step(boosted_loss, model, optimizer, graph=engine[1], on_failure="raise")
    frozen, moving = model.conv.weight.detach().clone(), model.head.weight.detach().clone()
    for batch in make_batches(engine[0], [16] * 5):
        step(*batch)
    assert torch.equal(frozen, model.conv.weight)
    assert not torch.equal(moving, model.head.weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_scheduler_runs_on_the_host(engine: Engine) -> None:
    """The schedule is computed in Python floats, as without ampkit, and checkpoints hold floats."""
    model = make_net(engine[0])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
    step = ampkit.graphed_step(boosted_loss, model, optimizer, scheduler=scheduler, graph=engine[1], on_failure="raise")
    twin_optimizer = OPTIMIZERS["sgd"](make_net("cpu").parameters())
    twin = torch.optim.lr_scheduler.OneCycleLR(twin_optimizer, 0.1, total_steps=20, cycle_momentum=False)
    for batch in make_batches(engine[0], [16] * 10):
        step(*batch)
        twin_optimizer.step()
        twin.step()
        assert scheduler.get_last_lr() == twin.get_last_lr()
    assert step.replays == 7
    assert type(optimizer.state_dict()["param_groups"][0]["lr"]) is float


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("load optimizer", "the optimizer's state was replaced.*Load a checkpoint before the first call"),
        ("momentum", r"param_groups\[0\]\['momentum'\] changed"),
        ("eval", "train/eval mode"),
        ("freeze", "train/eval mode or requires_grad"),
        ("growth interval", "growth_interval changed"),
        ("autocast around", r"autocast around the step changed"),
        ("new storage", "a parameter or buffer was moved to other memory.*written to in place"),
        ("new buffer", "model.norm.running_mean was replaced"),
        ("add group", "a param group was added.*Give the optimizer all of its parameters before"),
        ("hook of a module", "hooks of modules and parameters changed"),
        ("hook of all modules", "hooks of modules and parameters changed"),
        ("hook of a parameter", "hooks of modules and parameters changed"),
        ("packed tensors", "saved_tensors_hooks around the step changed"),
    ],
)
@pytest.mark.sampled(3)
def test_stale_graphs_are_dropped(engine: Engine, change: str, says: str) -> None:
    """G10: a change of what a graph has frozen leads to one warning, a warm-up and a new capture, with eager's bits."""
    device = engine[0]

    def run(graph: str) -> list[Any]:
        model = make_net(device)
        optimizer = torch.optim.SGD(
            [*model.conv.parameters(), *model.head.parameters()], 0.05, momentum=0.9, fused=True
        )
        step = ampkit.graphed_step(
            boosted_loss, model, optimizer, policy=policy, scaler=scaler(), graph=graph, on_failure="raise"
        )
        batches = iter(make_batches(device, [16] * 12))
        history = []
        torch.manual_seed(5)
        for batch in itertools.islice(batches, 6):
            history.append(step(*batch).loss)
        context = apply(change, model, optimizer, step.scaler)
        with context:
            if graph == "off":
                history.append(step(*next(batches)).loss)
            else:
                with pytest.warns(ampkit.CaptureWarning, match=says):
                    history.append(step(*next(batches)).loss)
            for batch in batches:
                history.append(step(*batch).loss)
        if graph != "off":
            assert (step.captures, step.replays) == (2, 3 + 3)
        return [history, training_state(model, optimizer, step.scaler)]

    policy = None if change == "autocast around" else "float16"

    def scaler() -> ampkit.GradScaler:
        return ampkit.GradScaler(device, init_scale=128.0)

    with deterministic():
        assert_same(run("off"), run(engine[1]))


def apply(change: str, model: Any, optimizer: torch.optim.Optimizer, scaler: ampkit.GradScaler) -> Any:
    """Do what a user might do in mid-training; return a context for the steps after it."""
    device = next(model.parameters()).device
    if change == "hook of all modules":
        return register_module_forward_hook(lambda part, _, out: out * 2 if isinstance(part, nn.Linear) else None)
    if change == "packed tensors":
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor.bfloat16() if tensor.is_floating_point() else tensor, tensor.dtype),
            lambda packed: packed[0].to(packed[1]),
        )
    if change == "load optimizer":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif change == "momentum":
        optimizer.param_groups[0]["momentum"] = 0.5
    elif change == "eval":
        model.eval()
    elif change == "freeze":
        model.conv.weight.requires_grad_(False)
    elif change == "growth interval":
        scaler.set_growth_interval(2)
    elif change == "new storage":
        model.head.weight.data = model.head.weight.data.clone()
    elif change == "new buffer":
        model.norm.running_mean = torch.ones_like(model.norm.running_mean)
    elif change == "add group":
        optimizer.add_param_group({"params": model.norm.parameters(), "lr": 0.01})
    elif change == "hook of a module":
        model.head.register_forward_hook(lambda part, _, out: out * 2)
    elif change == "hook of a parameter":
        model.head.weight.register_hook(lambda grad: grad * 2)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "autocast around")


@pytest.mark.parametrize("engine", ENGINES)
def test_model_state_may_be_loaded_in_mid_training(engine: Engine) -> None:
    """load_state_dict copies in place: the graph stays and trains on from the loaded weights."""
    step, model, _ = make(engine, "sgd")
    batches = make_batches(engine[0], [16] * 6)
    for batch in batches[:5]:
        step(*batch)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(zeros)
    out = step(*batches[5])
    torch.testing.assert_close(out.loss.cpu(), torch.tensor(10.0).log())  # all logits 0
    assert (step.captures, step.replays) == (1, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_gone_after_a_step(engine: Engine) -> None:
    """A captured gradient lives in the graph's pool; nobody must find it in param.grad, or accumulate into it."""
    step, model, _ = make(engine)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e6)
    for batch in make_batches(engine[0], [16] * 6):
        step(*batch)
        assert all(param.grad is None for param in model.parameters())
    assert step.replays == 3
    assert all(param.abs().max() < 10 for param in model.parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_output_dtype_is_the_policys(engine: Engine) -> None:
    """Floating tensors are returned in policy.output, others as they are."""

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> tuple[Tensor, Any]:
        logits = model(images)
        return F.cross_entropy(logits, labels), (logits, labels, None)

    policy = ampkit.Policy.parse("compute=bfloat16,output=bfloat16")
    step, _, _ = make(engine, loss_fn=loss_fn, policy=policy)
    for batch in make_batches(engine[0], [16] * 5):
        out = step(*batch)
    logits, labels, nothing = out.aux
    assert (out.loss.dtype, logits.dtype, labels.dtype, nothing) == (torch.bfloat16, torch.bfloat16, torch.int64, None)
    assert logits.shape == (16, 10)


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_norm(engine: Engine) -> None:
    """The norm is reported where it was computed: always with scaling, otherwise with max_norm; inf measures only."""
    batches = make_batches(engine[0], [16] * 5)
    none, _, _ = make(engine)
    measured, _, _ = make(engine, max_norm=float("inf"))
    for batch in batches:
        with deterministic():
            torch.manual_seed(1)
            assert none(*batch).grad_norm is None
            torch.manual_seed(1)
            norm = measured(*batch).grad_norm
        assert norm is not None
        assert norm > 0
    assert measured.replays == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_close_gives_up_the_graph(engine: Engine) -> None:
    """After close the step works on: warm-up and capture start again."""
    step, _, _ = make(engine)
    batches = make_batches(engine[0], [16] * 10)
    for batch in batches[:5]:
        step(*batch)
    step.close()
    assert (step.report().graphs, step.report().bytes) == (0, 0)
    for batch in batches[5:]:
        step(*batch)
    assert (step.captures, step.replays) == (2, 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_report_reads_like_a_sentence(engine: Engine) -> None:
    """The printed report has every count; to_dict is JSON."""
    step, _, _ = make(engine, policy="float16")
    for batch in make_batches(engine[0], [16] * 5 + [3], overflow_at=(4,)):
        step(*batch)
    text = str(step.report())
    assert text.startswith("6 steps: 2 replayed, 4 eager, 1 skipped; 1 graph(s), ")
    assert "eager x4: warm-up" in text
    assert re.search(r"graph [\d.]+ MiB, replayed x2: \(16, 3, 8, 8\) float32 on (cpu|cuda:0), \(16,\) int64", text)
    assert json.loads(json.dumps(step.report().to_dict()))["per_graph"][0]["replays"] == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_bytes_of_inputs_are_listed_apart(engine: Engine) -> None:
    """G10: those that each call copies its batch to; a scan has some for sixteen batches more."""
    step, _, _ = make(engine)
    batches = make_batches(engine[0], [512] * 4)
    for batch in batches:
        step(*batch)
    report = step.report()
    assert report.input_bytes == sum(tensor.nbytes for tensor in batches[0])
    assert report.bytes >= report.input_bytes
    assert f"MiB ({report.input_bytes / 2**20:.1f} of them for inputs)" in str(report)
    step.scan(*(torch.stack(parts) for parts in zip(*batches * 4, strict=True)))
    assert step.report().input_bytes > 16 * report.input_bytes


@pytest.mark.cuda
def test_a_replayed_step_never_waits() -> None:
    """No host read anywhere in a call, with clipping, a schedule, float16 and an overflow."""
    model = make_net("cuda")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="float16", max_norm=1.0, scheduler=scheduler, on_failure="raise"
    )
    batches = make_batches("cuda", [16] * 12, overflow_at=(8,))
    for batch in batches[:5]:
        step(*batch)
    with no_sync():
        for batch in batches[5:]:
            step(*batch)
    assert (step.replays, step.skipped) == (9, 1)


@pytest.mark.cuda
@pytest.mark.slow
def test_resnet18_bitwise() -> None:
    """A whole ResNet-18 in channels_last, float16, clip, cosine schedule, two overflows: eager's bits after 12."""
    torchvision = pytest.importorskip("torchvision")

    def run(graph: str) -> Any:
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=10).to("cuda", memory_format=torch.channels_last)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(
            boosted_loss,
            model,
            optimizer,
            policy="float16",
            max_norm=1.0,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
            graph=graph,
            on_failure="raise",
        )
        made = torch.Generator().manual_seed(2)
        losses = []
        for i in range(12):
            images = torch.randn(16, 3, 64, 64, generator=made).to("cuda", memory_format=torch.channels_last)
            labels = torch.randint(10, (16,), generator=made).cuda()
            losses.append(step(images, labels, torch.tensor(float("inf") if i in (1, 7) else 1.0).cuda()).loss)
        return losses, training_state(model, optimizer, step.scaler), step.skipped

    with deterministic():
        assert_same(run("off"), run("auto"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cycled_hyperparameter_is_said_once(engine: Engine) -> None:
    """OneCycleLR cycles momentum by default: every step is eager and right, with one warning and the reason counted."""
    model = make_net(engine[0])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    step = ampkit.graphed_step(boosted_loss, model, optimizer, scheduler=scheduler, graph=engine[1])
    batches = make_batches(engine[0], [16] * 8)
    step(*batches[0])
    with pytest.warns(ampkit.CaptureWarning, match=r"\['momentum'\] changed from 0.95 to .* 3 eager .* cycle_momentum"):
        step(*batches[1])
    for batch in batches[2:]:
        step(*batch)
    assert (step.captures, step.replays) == (0, 0)
    assert step.report().eager == {"warm-up": 1, "warm-up again: param_groups[0]['momentum'] changed": 7}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_another_policy_around_the_step_is_noticed(engine: Engine) -> None:
    """A11: a graph captured under one policy's op rules is not replayed under another's."""

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> tuple[Tensor, Tensor]:
        out = model(images).softmax(-1)
        return out.float().square().mean(), out

    step, _, _ = make(engine, policy=None, loss_fn=loss_fn)
    batches = make_batches(engine[0], [16] * 12)
    first, second = (ampkit.Policy(ops={"softmax": dtype}) for dtype in ("float16", "bfloat16"))
    for batch in batches[:6]:
        with first.autocast(engine[0]):
            out = step(*batch)
    assert (step.replays, out.aux.dtype) == (3, torch.float16)
    with second.autocast(engine[0]), pytest.warns(ampkit.CaptureWarning, match="the policy around the step changed"):
        out = step(*batches[6])
    assert out.aux.dtype is torch.bfloat16
    for batch in batches[7:]:
        with second.autocast(engine[0]):
            out = step(*batch)
    assert (step.captures, step.replays, out.aux.dtype) == (2, 6, torch.bfloat16)


@pytest.mark.parametrize("engine", ENGINES)
def test_another_policy_on_the_model_is_noticed(engine: Engine) -> None:
    """A11: applying other module rules after the capture leads to a new one."""
    model = make_net(engine[0])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    first, second = (ampkit.Policy(modules={"head": dtype}) for dtype in ("float16", "bfloat16"))
    first.apply(model)
    step = ampkit.graphed_step(boosted_loss, model, optimizer, graph=engine[1], on_failure="raise")
    batches = make_batches(engine[0], [16] * 6)
    for batch in batches[:5]:
        step(*batch)
    second.apply(model)
    with pytest.warns(ampkit.CaptureWarning, match="the policy on the model changed"):
        step(*batches[5])
    assert (step.captures, step.replays) == (1, 2)
