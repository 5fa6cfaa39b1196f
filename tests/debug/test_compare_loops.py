"""compare_loops: the first step and tensor that differ are named, and of each cause the reason is the right one."""

import functools
import gc
import random
import re
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import DEVICES, ENGINES, deterministic
from tape import taped
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.debug import LoopComparison, compare_loops

Sgd = functools.partial(torch.optim.SGD, momentum=0.9, fused=True)
AdamW = functools.partial(torch.optim.AdamW, fused=True)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def make_model(device="cpu"):
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    return nn.Sequential(*layers).to(device)


def batches(count=6, device="cpu", rows=8):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, rows, 8, generator=generator), torch.randint(4, (count, rows), generator=generator)
    return [*zip(x.to(device), y.to(device), strict=True)]


def raw(optimizer=AdamW, lr=0.01, max_norm=None, device="cpu", backward=1.0, loss=loss_fn, before=lambda number: None):
    """Return the factory of a loop written with torch alone; `before(number)` runs at the beginning of each step."""

    def factory():
        model = make_model(device)
        opt = optimizer(model.parameters(), lr=lr)
        made = 0

        def step(x, y):
            nonlocal made
            made += 1
            before(SimpleNamespace(number=made, optimizer=opt, model=model))
            opt.zero_grad()
            value = loss(model, x, y)
            (value * backward).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            return value

        return model, step

    return factory


def graphed(optimizer=AdamW, lr=0.01, device="cpu", graph="emulate", **options):
    def factory():
        model = make_model(device)
        step = ampkit.graphed_step(loss_fn, model, optimizer(model.parameters(), lr=lr), graph=graph, **options)
        return model, step

    return factory


def assert_found(compared: LoopComparison, cause: str, step: int, first: str) -> None:
    assert compared.first is not None
    assert (compared.cause, compared.step, compared.first.path) == (cause, step, first), str(compared)
    assert not compared.equal
    assert f"likely reason ({cause}): " in str(compared)


# --------------------------------------------------------------------------------------------------------------- equal


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", [Sgd, AdamW])
def test_a_graphed_step_beside_a_raw_loop(engine, optimizer):
    """Warm-up, capture and replays have the bits of the loop, with dropout and BatchNorm."""
    device, graph = engine
    with deterministic():
        old, new = raw(optimizer, lr=2**-7, device=device), graphed(optimizer, lr=2**-7, device=device, graph=graph)
        compared = compare_loops(old, new, batches(device=device))
    assert compared.equal
    assert (compared.steps, compared.step, compared.equal_until, compared.rows) == (6, None, 6, ())
    assert (compared.cause, compared.reason, compared.generators_part) == ("", "", None)
    assert str(compared) == "6 steps are equal bit by bit (10 tensors: loss, parameters, buffers)"


def test_what_a_graph_freezes_is_found():
    """A number that a graph held as a constant would be seen in the first replay that needs another one."""
    rates = lambda now: now.optimizer.param_groups[0].update(lr=0.01 if now.number < 5 else 0.02)  # noqa: E731

    def new():
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        step, made = ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate"), 0

        def with_rate(x, y):
            nonlocal made
            made += 1
            rates(SimpleNamespace(number=made, optimizer=optimizer))
            return step(x, y)

        return model, with_rate

    with taped():
        assert compare_loops(raw(before=rates), new, batches()).equal
        assert_found(compare_loops(raw(before=rates), graphed(), batches()), "rate", 5, "0.bias")


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (torch.ones(2, 3), lambda x: x),
        ((torch.ones(2), torch.ones(2)), lambda x, y: x + y),
        ([torch.ones(2), 2.0], lambda x, y: x * y),
        ({"x": torch.ones(2), "y": {"z": torch.ones(2)}}, lambda x, y: x + y["z"]),
        (({"x": torch.ones(2)},), lambda batch: batch["x"]),
    ],
)
def test_how_batches_are_passed(batch, read):
    """A tuple or list by position, a dict by name, anything else as it is; the loss may be in `.loss`."""

    def factory():
        scale = nn.Linear(1, 1)
        return scale, lambda *args, **kwargs: SimpleNamespace(loss=read(*args, **kwargs).sum() * scale.weight)

    assert compare_loops(factory, factory, [batch] * 2).equal


def test_a_loop_that_writes_its_batch_does_not_spoil_the_other():
    def doubles(module, args):
        args[0].mul_(2.0)

    def writes(now):
        now.model[0].register_forward_pre_hook(doubles)

    given = batches(3)
    kept = [(x.clone(), y.clone()) for x, y in given]
    once = lambda now: writes(now) if now.number == 1 else None  # noqa: E731
    assert compare_loops(raw(before=once), raw(before=once), given).equal
    assert all(torch.equal(a, b) for old, now in zip(kept, given, strict=True) for a, b in zip(old, now, strict=True))


def test_several_modules_and_wrapped_ones():
    """Names do not contain what torch.compile and DDP add; of several modules they begin with the index."""

    def two(wrap):
        def factory():
            models = make_model(), nn.Linear(4, 1)
            whole = wrap(models[0])
            optimizer = Sgd([*models[0].parameters(), *models[1].parameters()], lr=0.1)

            def step(x, y):
                optimizer.zero_grad()
                loss = models[1](models[0](x)).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            return [whole, models[1]], step

        return factory

    compiled = functools.partial(torch.compile, backend="eager")
    compared = compare_loops(two(lambda model: model), two(compiled), batches())
    assert compared.equal
    assert compared.compared == 12
    off = compare_loops(two(lambda model: model), two(lambda model: model.requires_grad_(False)), batches())
    assert_found(off, "no update", 1, "model[0].0.weight")


# -------------------------------------------------------------------------------------------------------------- causes


@pytest.mark.parametrize("optimizer", [Sgd, AdamW])
def test_clipping_in_the_kernel(optimizer):
    """The last bits of parameters, and with arithmetic="torch" none."""
    old = raw(optimizer, max_norm=0.1)
    compared = compare_loops(old, graphed(optimizer, max_norm=0.1), batches())
    assert compared.first is not None
    assert (compared.cause, compared.first.kind) == ("rounding", "parameter")
    assert 'arithmetic="torch"' in compared.reason
    assert compare_loops(old, graphed(optimizer, max_norm=0.1, arithmetic="torch"), batches()).equal


@pytest.mark.parametrize("optimizer", [Sgd, AdamW])
@pytest.mark.parametrize("ratio", [0.25, 1.01, 3.0])
def test_rate(optimizer, ratio):
    compared = compare_loops(raw(optimizer), raw(optimizer, lr=0.01 * ratio), batches())
    assert_found(compared, "rate", 1, compared.rows[0].path)
    assert f"update is {ratio:.4g} times" in compared.reason


def test_rates_by_group():
    def half_for_the_last(now):
        if now.number == 1:
            weight, bias = now.model[4].parameters()
            group = now.optimizer.param_groups[0]
            group["params"] = [param for param in group["params"] if param is not weight and param is not bias]
            now.optimizer.add_param_group({"params": [weight, bias], "lr": 0.005})

    compared = compare_loops(raw(Sgd), raw(Sgd, lr=0.02, before=half_for_the_last), batches())
    assert_found(compared, "rate", 1, "0.weight")
    assert "update is 0.5 to 2, by tensor, times" in compared.reason


def test_scaled_gradients_are_a_rate_of_sgd():
    """A loss that is divided for the backward alone."""
    compared = compare_loops(raw(Sgd), raw(Sgd, backward=0.25), batches())
    assert_found(compared, "rate", 1, compared.rows[0].path)
    assert "0.25 times" in compared.reason


@pytest.mark.parametrize(("factor", "count"), [(0.25, 6), (4.0, 1), (0.7, 6)])
def test_loss_factor(factor, count):
    """A whole number is told by one step, another factor by several."""
    scaled = raw(loss=lambda *args: loss_fn(*args) * factor)
    compared = compare_loops(raw(), scaled, batches(count))
    assert_found(compared, "loss factor", 1, "loss")
    assert f"is {factor:.6g} times the old one" in compared.reason


def test_what_is_added_is_no_factor():
    """On the same batch again and again, with hardly any progress, it has a constant ratio, too."""
    added = raw(lr=1e-9, loss=lambda *args: loss_fn(*args) + 0.37, before=lambda now: now.model[3].eval())
    plain = raw(lr=1e-9, before=lambda now: now.model[3].eval())
    assert_found(compare_loops(plain, added, batches(1) * 6), "unknown", 1, "loss")


def test_one_element_gives_no_ratio():
    """Two parameters of one element each, whose updates have two ratios."""

    def scalars(*rates):
        def factory():
            model = nn.Linear(1, 1)
            groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
            optimizer = torch.optim.SGD(groups)

            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            return model, step

        return factory

    compared = compare_loops(scalars(0.1, 0.1), scalars(0.2, 0.3), [torch.ones(4, 1)])
    assert_found(compared, "unknown", 1, "bias")


def test_more_draws():
    """The generators differ behind the first step; the loss at once if the draw comes before the dropout."""
    compared = compare_loops(raw(), raw(before=lambda now: torch.rand(3)), batches())
    assert_found(compared, "generators", 1, "loss")
    assert compared.generators_part == (1, ("torch on cpu",))
    late = lambda now: now.model[4].register_forward_hook(lambda *args: torch.rand(1) and None)  # noqa: E731
    compared = compare_loops(raw(), raw(before=late), batches())
    assert_found(compared, "generators", 2, "loss")
    assert "differ behind step 1 (torch on cpu)" in compared.reason


def test_draws_that_change_nothing_are_told():
    compared = compare_loops(raw(), raw(before=lambda now: (random.random(), np.random.rand())), batches())
    assert compared.equal
    assert compared.generators_part == (1, ("numpy.random", "random"))
    assert str(compared).endswith("numpy.random, random differ behind step 1")


@pytest.mark.cuda
def test_more_draws_on_cuda():
    with deterministic():
        more = raw(device="cuda", before=lambda now: torch.rand(3, device="cuda"))
        compared = compare_loops(raw(device="cuda"), more, batches(device="cuda"))
    assert compared.cause == "generators"
    offsets = re.search(r"torch on cuda:0 at offset (\d+) in the old loop, (\d+) in the new one", compared.reason)
    assert offsets is not None
    assert int(offsets[1]) < int(offsets[2])


def test_dtype_of_the_loss():
    compared = compare_loops(raw(), raw(loss=lambda *args: loss_fn(*args).bfloat16()), batches())
    assert_found(compared, "dtype", 1, "loss")
    assert "loss is float32 in the old loop and bfloat16 in the new one" in compared.reason
    compared = compare_loops(raw(), raw(loss=lambda *args: loss_fn(*args)[None]), batches())
    assert_found(compared, "dtype", 1, "loss")


def test_autocast_in_one_loop():
    """A float32 loss of a forward in bfloat16; both in bfloat16 are equal."""

    def autocast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(*args)

    assert_found(compare_loops(raw(loss=autocast), graphed(), batches()), "precision", 1, "loss")
    assert compare_loops(raw(loss=autocast), graphed(policy="bfloat16"), batches()).equal


def test_a_batch_of_another_layout():
    """One loop pads the last batch."""

    def padded(model, x, y):
        return loss_fn(model, F.pad(x, (0, 0, 0, 8 - len(x))), F.pad(y, (0, 8 - len(y))))

    plain = {"optimizer": Sgd, "lr": 0.0}
    given = [*batches(3), *batches(1, rows=5)]
    without_dropout = lambda now: now.model[3].eval()  # noqa: E731
    old, new = raw(**plain, before=without_dropout), raw(**plain, loss=padded, before=without_dropout)
    compared = compare_loops(old, new, given)
    assert_found(compared, "batch", 4, "loss")
    assert "batch 4 is the first that has (5, 8) float32, (5,) int64" in compared.reason


def accumulating(count, divided, device="cpu"):
    """Return the factory of a loop that steps every so many micro-batches."""

    def factory():
        model = make_model(device)
        optimizer, made = AdamW(model.parameters(), lr=2**-7), 0

        def step(x, y):
            nonlocal made
            made += 1
            loss = loss_fn(model, x, y)
            (loss / count).backward()
            if made % count == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss / count if divided else loss

        return model, step

    return factory


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulation(engine):
    """Equal, micro-batch by micro-batch; a loss that is divided is a factor, another count no update."""
    device, graph = engine
    new = graphed(lr=2**-7, device=device, graph=graph, accumulate=2)
    given = batches(8, device=device)
    with deterministic():
        assert compare_loops(accumulating(2, False, device), new, given).equal
        assert_found(compare_loops(accumulating(2, True, device), new, given), "loss factor", 1, "loss")
        compared = compare_loops(accumulating(4, False, device), new, given)
    assert (compared.cause, compared.step) == ("no update", 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_loss_scaling(engine):
    """A loop with torch's scaler, with overflows in its first steps, beside a step in float16."""
    device, graph = engine

    def old():
        model = make_model(device)
        optimizer = AdamW(model.parameters(), lr=2**-7)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**20)

        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return model, step

    def new(scale):
        def factory():
            model = make_model(device)
            scaler = ampkit.GradScaler(device, init_scale=scale)
            optimizer = AdamW(model.parameters(), lr=2**-7)
            options = {"policy": "float16", "scaler": scaler, "graph": graph}
            return model, ampkit.graphed_step(loss_fn, model, optimizer, **options)

        return factory

    given = batches(8, device=device)
    with deterministic():
        assert compare_loops(old, new(2.0**20), given).equal
        compared = compare_loops(old, new(2.0**4), given)
    assert (compared.cause, compared.step) == ("no update", 1)
    assert "only the new loop has changed" in compared.reason


def test_a_skipped_step():
    def skips(now):
        now.optimizer.param_groups[0]["lr"] = 0.0 if now.number == 3 else 0.01

    compared = compare_loops(raw(Sgd), raw(Sgd, before=skips), batches())
    assert_found(compared, "no update", 3, compared.rows[0].path)
    assert "only the old loop has changed" in compared.reason


def test_unknown():
    """Another loss, with the same draws."""
    other = raw(
        loss=lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.5) + model[0].weight.square().mean()
    )
    compared = compare_loops(raw(), other, batches())
    assert_found(compared, "unknown", 1, "loss")


def test_a_loop_that_does_not_repeat_itself():
    """Neither is to blame: the old one differs from itself."""
    own = torch.Generator()
    noise = lambda now: now.model[0].weight.data.add_(torch.rand(16, 8, generator=own))  # noqa: E731
    assert_found(compare_loops(raw(before=noise), raw(), batches()), "repeatability", 1, "loss")


@pytest.mark.parametrize("shared", ["both", "old", "new"])
def test_models_that_differ_at_once(shared):
    torch.manual_seed(9)  # not the one that seeds loops
    model = make_model()
    with_trained = lambda: (model, lambda x, y: loss_fn(model, x, y))  # noqa: E731
    other = lambda: (nn.Linear(8, 4), lambda x, y: loss_fn(model, x, y))  # noqa: E731
    old, new = {"both": (raw(), with_trained), "old": (with_trained, raw()), "new": (raw(), other)}[shared]
    compared = compare_loops(old, new, batches())
    assert (compared.step, compared.cause, compared.equal_until) == (0, "factory", -1)
    assert "the models differ before the first step" in str(compared)
    if shared == "new":
        assert "parameter 0.bias: only the old loop has it" in str(compared)


def test_a_model_that_the_old_factory_does_not_build():
    model = make_model()

    def old():
        optimizer = Sgd(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    compared = compare_loops(old, old, batches())
    assert (compared.step, compared.cause) == (0, "factory")
    assert "old() builds another model when it is called again" in compared.reason


# ------------------------------------------------------------------------------------------------- every, state, errors


def test_every():
    """Steps between are not compared; the last one is."""
    late = lambda now: now.optimizer.param_groups[0].update(lr=0.01 if now.number < 4 else 0.02)  # noqa: E731
    compared = compare_loops(raw(), raw(before=late), batches(), every=2)
    assert (compared.step, compared.equal_until, compared.cause) == (4, 2, "unknown")
    assert "the loops differ behind step 4, and were equal behind step 2" in str(compared)
    assert "with every=1" in compared.reason
    compared = compare_loops(raw(), raw(before=late), batches(5), every=10)
    assert (compared.step, compared.equal_until) == (5, 0)
    compared = compare_loops(raw(), raw(), batches(5), every=10)
    assert "compared every 10 steps and behind the last one" in str(compared)


@pytest.mark.parametrize("device", DEVICES)
def test_one_model_at_a_time_and_random_numbers_as_before(device):
    """The old model is gone when the new one is built; generators of the caller are as before, after errors too."""
    alive: list[weakref.ref] = []

    def watched(factory):
        def build():
            gc.collect()
            assert not [model for model in alive if model() is not None]
            model, step = factory()
            alive.append(weakref.ref(model))
            return model, step

        return build

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with deterministic():
        old, new = raw(device=device), raw(device=device, lr=0.02)
        assert not compare_loops(watched(old), watched(new), batches(device=device)).equal
    with pytest.raises(ZeroDivisionError):
        compare_loops(raw(before=lambda now: 1 / 0), raw(), batches())
    assert len(alive) == 3  # the old loop twice
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_the_same_numbers_for_both():
    """Weights drawn from torch, Python and numpy are those of the other loop, and depend on the seed."""
    drawn = []

    def factory():
        model = nn.Linear(1, 1)
        with torch.no_grad():
            model.bias.add_(random.random() + np.random.rand())
        drawn.append(model.bias.item())
        return model, lambda x: model(x + random.random()).sum()

    assert compare_loops(factory, factory, [torch.ones(1, 1)]).equal
    assert compare_loops(factory, factory, [torch.ones(1, 1)], seed=1).equal
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_special_values():
    """nan at the same place is equal; in one loop alone it is apart as far as can be, and no cause is made of it."""
    nan = raw(loss=lambda *args: loss_fn(*args) * float("nan"))
    assert compare_loops(nan, nan, batches()).equal
    compared = compare_loops(raw(), nan, batches())
    assert_found(compared, "unknown", 1, "loss")
    assert compared.rows[0].absolute == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": make_model()}, None),
        ({"old": 3}, r"compare_loops\(old=3\): expected a function without arguments that returns \(model, step\)"),
        ({"new": None}, r"compare_loops\(new=None\): expected a function"),
        ({"batches": []}, r"compare_loops\(batches=\[\]\): expected a list of batches, at least one"),
        ({"batches": torch.ones(3)}, r"expected a list of batches"),
        ({"every": 0}, r"compare_loops\(every=0\): expected an int of at least 1"),
        ({"seed": -1}, r"compare_loops\(seed=-1\): expected an int from 0"),
        ({"old": lambda: None}, r"old\(\) returned NoneType, expected \(model, step\)"),
        ({"new": lambda: (3, print)}, r"new\(\) returned int as its model, expected a torch.nn.Module"),
        ({"new": lambda: (make_model(), 3)}, r"new\(\) returned \(Sequential, int\), expected \(model, step\)"),
        ({"old": lambda: (make_model(), lambda x, y: 3.0)}, r"step of old\(\) returned float, .* without \.item\(\)"),
        ({"old": lambda: (make_model(), lambda x, y: None)}, r"step of old\(\) returned NoneType"),
    ],
)
def test_wrong_use(change, message):
    arguments = {"old": raw(), "new": raw(), "batches": batches(1)} | change
    if message is None:  # a module can be called, but needs its input
        with pytest.raises(TypeError, match="forward"):
            compare_loops(**arguments)
        return
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        compare_loops(**arguments)
