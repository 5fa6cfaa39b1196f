"""TrainingState: names of tensors, what changes a generation and what does not, putting tensors back."""

import torch
from harness import make_net

from ampkit import GradScaler
from ampkit._state import TrainingState


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
