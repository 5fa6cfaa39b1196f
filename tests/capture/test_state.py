"""TrainingState: names of tensors, what changes a generation and what does not, putting tensors back."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from harness import make_net
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import GradScaler
from ampkit._capture.state import watch as _watch
from ampkit._capture.state.state import TrainingState


def make() -> tuple[TrainingState, torch.nn.Module, torch.optim.Optimizer]:
    model = make_net("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    return TrainingState({"model": model}, [optimizer], GradScaler("cpu")), model, optimizer


def test_tensors_have_readable_names() -> None:
    """Parameters, buffers and optimizer state are named as a user would."""
    state, model, _ = make()
    tensors = state.tensors()
    assert tensors["model.head.weight"] is model.head.weight
    assert "model.norm.running_mean" in tensors
    assert "optimizer[0].model.conv.bias.exp_avg" in tensors


def test_state_of_parameters_that_are_none_of_the_modules() -> None:
    """Each moment has a name of its own."""
    model = make_net("cpu")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    tensors = TrainingState({}, [optimizer]).tensors()
    assert len(tensors) == 3 * len(list(model.parameters()))
    assert "optimizer[0].state[1].exp_avg" in tensors


def test_training_does_not_change_the_generation() -> None:
    """Values change in every step; addresses, modes and hyperparameters do not. Nor does a new learning rate count."""
    state, model, optimizer = make()
    before = state.generation()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    assert state.generation() == before
    assert before.replaced_in(state.generation()) == ""
    assert before.settings.changes(state.generation().settings) == ""


def test_two_loads_in_a_row_are_a_change() -> None:
    """An address that the allocator hands out again is not taken for the old object."""
    state, _, optimizer = make()
    before = state.generation()
    for _ in range(10):
        optimizer.load_state_dict(optimizer.state_dict())
        assert state.generation() != before


def test_rebind_puts_tensors_back() -> None:
    """New and replaced tensors are reported by name and undone."""
    state, model, optimizer = make()
    before = state.tensors()
    mean = model.norm.running_mean
    model.norm.running_mean = mean + 1
    optimizer.state[model.head.bias]["extra"] = torch.zeros(1)
    assert state.rebound_since(before) == ["model.norm.running_mean", "optimizer[0].model.head.bias.extra"]
    state.rebind(before)
    assert state.rebound_since(before) == []
    assert model.norm.running_mean is mean
    assert "extra" not in optimizer.state[model.head.bias]


def test_plain_attributes_that_are_rebound() -> None:
    """A tensor that a module keeps as a plain attribute is state too; one that is derived from parameters is not."""
    state, model, _ = make()
    model.seen, model.last = torch.zeros(2), None
    model.derived = model.head.weight * 2
    before = state.tensors()
    model.seen, model.last = model.seen + 1, torch.ones(3)
    model.derived = model.head.weight * 3
    assert state.rebound_since(before) == ["model.seen", "model.last"]
    state.rebind(before)
    assert model.seen is before["model.seen"]
    assert model.last is None


def test_shared_modules_are_walked_once() -> None:
    """A module registered under two names, or inside itself by way of a cycle, does not hang or double the walk."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.append(model[0])
    state = TrainingState({"model": model}, [])
    assert len(state.generation().settings.modes) == 2 + 2


# ------------------------------------------------------------------------------------------- what a graph has frozen

Touch = Callable[[Any, torch.optim.Optimizer], object]
REPLACED: dict[str, tuple[str, Touch]] = {
    "load_state_dict": ("load_state_dict", lambda m, o: o.load_state_dict(o.state_dict())),
    "a group in its place": ("load_state_dict", lambda m, o: o.param_groups.__setitem__(0, dict(o.param_groups[0]))),
    "its list of parameters": ("load_state_dict", lambda m, o: o.param_groups[0].update(params=[*m.parameters()])),
    "add_param_group": (
        "param group was added",
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ),
    "state cleared": ("state was cleared or replaced", lambda m, o: o.state.clear()),
    "state of a parameter": ("state was cleared or replaced", lambda m, o: o.state.update({m.conv.weight: {}})),
    "parameters in another order": (
        "state was replaced",
        lambda m, o: o.param_groups[0]["params"].reverse(),
    ),
    "a parameter more": ("added to a param group", lambda m, o: o.param_groups[0]["params"].append(m.head.bias)),
    "moment": (
        "exp_avg in the optimizer's state was replaced",
        lambda m, o: o.state[m.conv.bias].update(exp_avg=torch.zeros(8)),
    ),
    "step count": (
        "step in the optimizer's state was replaced",
        lambda m, o: o.state[m.head.bias].update(step=o.state[m.head.bias]["step"].clone()),
    ),
    "parameter": ("model.head.bias was replaced", lambda m, o: setattr(m.head, "bias", nn.Parameter(torch.ones(10)))),
    "parameter, same memory": (
        "model.head.bias was replaced",
        lambda m, o: setattr(m.head, "bias", nn.Parameter(m.head.bias.data)),
    ),
    "equal buffer of one element": (
        "model.norm.num_batches_tracked was replaced",
        lambda m, o: setattr(m.norm, "num_batches_tracked", m.norm.num_batches_tracked.clone()),
    ),
    "parameter set to None": ("model.head.bias was replaced", lambda m, o: setattr(m.head, "bias", None)),
    "module": ("model.dropout was replaced", lambda m, o: setattr(m, "dropout", nn.Dropout(0.3))),
    "module added in a leaf": ("was added", lambda m, o: m.conv.add_module("more", nn.ReLU())),
    "buffer added in a leaf": ("was added", lambda m, o: m.dropout.register_buffer("more", torch.ones(1))),
    "module removed": ("removed", lambda m, o: delattr(m, "dropout")),
    ".data of a parameter": ("other memory", lambda m, o: setattr(m.conv.weight, "data", m.conv.weight.data.clone())),
    ".data of a buffer": (
        "other memory",
        lambda m, o: setattr(m.norm.running_var, "data", m.norm.running_var.data.clone()),
    ),
    "set_": ("other memory", lambda m, o: m.norm.running_mean.set_(torch.zeros(8))),
}


def test_tensor_as_hyperparameter_is_read_where_it_is() -> None:
    """Another tensor in its place is another setting, whatever its value; the same one is not, whatever is in it."""
    state, _, optimizer = make()
    group = optimizer.param_groups[0]
    group["eps"] = torch.tensor(1e-8)
    before = state.generation()
    group["eps"].fill_(1e-6)
    assert state.generation() is before
    group["eps"] = group["eps"].clone()
    assert "['eps'] changed" in before.settings.changes(state.generation().settings)


def test_state_that_a_first_step_makes_replaces_nothing() -> None:
    """Moments that are made lazily begin another generation, but graphs of the one before stay valid."""
    state, model, optimizer = make()
    optimizer.state.clear()
    before = state.generation()
    model.head.bias.grad = torch.ones_like(model.head.bias)
    optimizer.step()
    after = state.generation()
    assert (after == before, before.replaced_in(after), before.settings) == (False, "", after.settings)


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_memory_is_noticed(name: str) -> None:
    """If memory that a graph reads is replaced, in any way, another generation begins, with the reason in words."""
    says, touch = REPLACED[name]
    state, model, optimizer = make()
    before = state.generation()
    assert state.generation() is before, "nothing was touched"
    touch(model, optimizer)
    after = state.generation()
    assert after != before
    assert says in before.replaced_in(after)
    assert state.generation() is after


SETTINGS: dict[str, tuple[str, Touch, Touch]] = {
    "eval of a leaf": ("train/eval", lambda m, o: m.dropout.eval(), lambda m, o: m.dropout.train()),
    "frozen parameter": (
        "requires_grad",
        lambda m, o: m.conv.bias.requires_grad_(False),
        lambda m, o: m.conv.bias.requires_grad_(True),
    ),
    "buffer with grad": (
        "requires_grad",
        lambda m, o: m.norm.running_mean.requires_grad_(True),
        lambda m, o: m.norm.running_mean.requires_grad_(False),
    ),
    "hyperparameter": (
        "param_groups[0]['eps'] changed",
        lambda m, o: o.param_groups[0].update(eps=0.5),
        lambda m, o: o.param_groups[0].update(eps=float("1e-8")),
    ),
    "number in a list": (
        "param_groups[0]['betas'] changed",
        lambda m, o: o.param_groups[0]["betas"].__setitem__(0, 0.5),
        lambda m, o: o.param_groups[0]["betas"].__setitem__(0, float("0.9")),
    ),
    "option added": (
        "the options of a param group changed",
        lambda m, o: o.param_groups[0].update(more=1),
        lambda m, o: o.param_groups[0].pop("more"),
    ),
    "option made a tensor": (
        "param_groups[0]['eps'] changed",
        lambda m, o: o.param_groups[0].update(eps=torch.tensor(1e-8)),
        lambda m, o: o.param_groups[0].update(eps=1e-8),
    ),
    "class of a module": (
        "the policy on the model changed",
        lambda m, o: setattr(m.head, "__class__", type("Other", (nn.Linear,), {})),
        lambda m, o: setattr(m.head, "__class__", nn.Linear),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_noticed_and_change_back(name: str) -> None:
    """A toggled setting gives other settings and a reason in words. Toggled back, the generation is equal again."""
    says, there, back = SETTINGS[name]
    state, model, optimizer = make()
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    before = state.generation()
    there(model, optimizer)
    after = state.generation()
    assert after != before
    assert before.replaced_in(after) == ""
    assert says in before.settings.changes(after.settings)
    assert state.generation() is after
    back(model, optimizer)
    assert state.generation() == before


class Passing(TorchFunctionMode):
    """A mode that only counts operations."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (torch.autocast("cpu", dtype=torch.bfloat16), "cpu autocast around the step"),
        (Passing(), "the policy around the step"),
        (nullcontext(), ""),
    ],
)
def test_what_is_entered_around_is_noticed(around: AbstractContextManager[Any], says: str) -> None:
    """Autocast and function modes around the call are settings like any other."""
    state, _, _ = make()
    before = state.generation()
    with around:
        inside = state.generation()
    assert (inside != before) == bool(says)
    assert says in before.settings.changes(inside.settings)
    assert state.generation() == before


def test_the_rule_of_the_scaler_is_noticed() -> None:
    """growth_interval and the like are constants in a graph."""
    state, _, _ = make()
    before = state.generation()
    assert isinstance(state.scaler, GradScaler)
    state.scaler.set_growth_interval(7)
    assert before.settings.changes(state.generation().settings) == "the scaler's growth_interval changed"


def test_gradients_that_are_found_are_noticed() -> None:
    """If a function may find gradients, one that is made, replaced or dropped is another setting."""
    _, model, optimizer = make()
    state = TrainingState({"model": model}, [optimizer], finds_gradients=True)
    optimizer.zero_grad()
    none = state.generation()
    model.conv.bias.grad = first = torch.ones(8)
    one = state.generation()
    assert "gradients were made" in none.settings.changes(one.settings)
    model.conv.bias.grad = torch.ones(8)
    assert state.generation() != one
    model.conv.bias.grad = first
    assert state.generation() == one
    model.conv.bias.grad = None
    assert state.generation() == none


def test_training_may_be_a_property() -> None:
    """A module class that computes `training` is asked each time."""

    class Odd(nn.Linear):
        mode = True

        @property
        def training(self) -> bool:  # type: ignore[override]
            return type(self).mode

        @training.setter
        def training(self, mode: bool) -> None:
            vars(self)["training"] = True

    state = TrainingState({"model": nn.Sequential(Odd(2, 2), nn.ReLU())}, [])
    before = state.generation()
    Odd.mode = False
    after = state.generation()
    assert before.settings.changes(after.settings) == "train/eval mode or requires_grad changed"


def test_the_look_at_the_state_is_no_operation() -> None:
    """No operation runs and no mode of the user's is asked, however many tensors there are."""
    state, _, _ = make()
    state.generation()

    class Operations(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Passing() as mode, Operations() as operations:
        state.generation()
        state.generation()
    assert (mode.calls, operations.seen) == (0, 0)


def changes() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]]:
    """Return changes that only a look at this very place can find."""

    def swap_keys(optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["other"] = group.pop("eps")

    def move_between_groups(optimizer: torch.optim.Optimizer) -> None:
        first, second = optimizer.param_groups
        second["params"].insert(0, first["params"].pop())

    return {
        "other memory": lambda model, _: setattr(model.head.weight, "data", model.head.weight.data.clone()),
        "a buffer's memory": lambda model, _: setattr(model.norm.running_mean, "data", torch.zeros(8)),
        "strides at the same address": lambda model, _: setattr(
            model.conv.weight, "data", model.conv.weight.data.transpose(2, 3)
        ),
        "a shape at the same address": lambda model, _: setattr(model.norm.bias, "data", model.norm.bias.data[:4]),
        "requires_grad": lambda model, _: model.head.bias.requires_grad_(False),
        "requires_grad of a buffer": lambda model, _: model.norm.running_var.requires_grad_(True),
        "training": lambda model, _: model.norm.eval(),
        "the class of a module": lambda model, _: setattr(model.norm, "__class__", type("Norm", (nn.BatchNorm2d,), {})),
        "an option": lambda _, optimizer: optimizer.param_groups[1].update(weight_decay=0.25),
        "a number in a list": lambda _, optimizer: optimizer.param_groups[0]["betas"].__setitem__(0, 0.5),
        "an option's name": lambda _, optimizer: swap_keys(optimizer),
        "an option more": lambda _, optimizer: optimizer.param_groups[0].update(new=1),
        "an option less": lambda _, optimizer: optimizer.param_groups[0].pop("eps"),
        "the group of a parameter": lambda _, optimizer: move_between_groups(optimizer),
        "a hook": lambda _, optimizer: optimizer.register_step_pre_hook(swap_keys),
        "a hook before a module": lambda model, _: model.head.register_forward_pre_hook(print),
        "a hook behind a module": lambda model, _: model.head.register_forward_hook(print),
        "a hook in backward": lambda model, _: model.head.register_full_backward_hook(print),
        "a hook of a parameter": lambda model, _: model.head.bias.register_hook(print),
        "a hook behind a gradient": lambda model, _: model.head.bias.register_post_accumulate_grad_hook(print),
        "a moment": lambda model, optimizer: optimizer.state.update({model.head.bias: {}}),
        "a state that was copied": lambda _, optimizer: setattr(optimizer, "state", optimizer.state.copy()),
    }


@pytest.mark.parametrize("what", list(changes()))
@pytest.mark.parametrize("one_by_one", [False, True], ids=["at once", "one by one"])
def test_a_call_sees_each_change(what: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls compare identities and layouts at once, or one by one where interpreter and torch have no way to do so."""
    if one_by_one:
        monkeypatch.setattr(_watch, "_READS_TUPLES", False)
        monkeypatch.setattr(_watch, "layout_check", lambda tensors: None)
    model = make_net("cpu")
    head = list(model.head.parameters())
    body = [param for param in model.parameters() if not any(param is other for other in head)]
    optimizer = torch.optim.AdamW([{"params": body, "betas": [0.9, 0.99]}, {"params": head}], fused=True)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = TrainingState({"model": model}, [optimizer], GradScaler("cpu"))
    before = state.generation()
    assert state.generation() is before
    changes()[what](model, optimizer)
    after = state.generation()
    assert after is not before
    assert after != before
    assert state.generation() is after


def test_hooks_that_come_and_go() -> None:
    """The graph from before a hook is used again behind it. Hooks of others change nothing, nor does a look at them."""
    state, model, _ = make()
    before = state.generation()

    class Counter:
        def count(self, *_: object) -> None:
            pass

    counter = Counter()
    elsewhere = nn.Linear(2, 2)
    elsewhere.register_forward_hook(counter.count)
    (elsewhere.weight * 2).register_hook(print)
    assert state.generation() is before
    generations = []
    for _ in range(2):
        with model.head.register_forward_hook(counter.count):  # another object each time
            generations.append(state.generation())
        assert state.generation() == before
    with model.head.register_forward_hook(Counter().count):
        generations.append(state.generation())
    with nn.modules.module.register_module_forward_pre_hook(counter.count):
        generations.append(state.generation())
    assert generations[0] == generations[1]
    assert len({id(generation.settings) for generation in generations[1:]}) == 3
    assert all(a != b for a, b in itertools.combinations([before, *generations[1:]], 2))
    assert before.settings.changes(generations[0].settings) == "hooks of modules and parameters changed"
    assert before.replaced_in(generations[0]) == ""


def test_requires_grad_is_seen_where_gradients_are_off() -> None:
    """The check of layouts then takes all tensors for tensors that require no gradient."""
    state, model, _ = make()
    with torch.no_grad():
        before = state.generation()
        model.head.bias.requires_grad_(False)
        after = state.generation()
    assert before.settings.changes(after.settings) == "train/eval mode or requires_grad changed"


def test_another_layout_at_the_same_address_outdates_graphs() -> None:
    """A graph would go on with the old strides. A parameter with two names is looked at once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = TrainingState({"model": model}, [])
    before = state.generation()
    assert state.generation() is before
    address = model[0].weight.data_ptr()
    model[0].weight.data = model[0].weight.data.t()
    assert model[0].weight.data_ptr() == address
    expected = "a parameter or buffer got another shape, other strides or another dtype"
    assert before.replaced_in(state.generation()) == expected


def test_addresses_in_a_tuple_are_identities() -> None:
    """In CPython the quick way is taken, and gives what `id` gives."""
    objects = (None, True, 1.5, [], *map(object.__new__, [object] * 50))
    assert _watch._pointers_of(len(objects))(objects) == _watch._ids(objects)
    assert _watch._READS_TUPLES
