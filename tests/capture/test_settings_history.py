"""What surrounds a call: the number that stands for its settings, and what is said of a change."""

from typing import Any

import pytest
import torch
from torch import nn

from ampkit._capture.engine.variation import Variation
from ampkit._capture.keys.inputs import read_batch
from ampkit._capture.keys.key import Key
from ampkit._capture.state.settings_history import SettingsHistory
from ampkit._capture.state.state import Generation, TrainingState


def observed() -> tuple[nn.Linear, torch.optim.SGD, SettingsHistory]:
    """Return a module, its optimizer, and their `SettingsHistory` after one call."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = SettingsHistory(TrainingState({"model": model}, [optimizer]))
    assert history.observe() is None
    return model, optimizer, history


def test_settings_that_come_back_have_their_number() -> None:
    """The first settings are no change. Other settings get another number, once. Both are known from then on."""
    model, _, history = observed()
    first = history.number
    model.eval()
    change = history.observe()
    assert change is not None
    assert (change.outdates, change.reason, change.advice) == (False, "train/eval mode or requires_grad changed", {})
    assert "call model.train() before the next step" in change.text
    second = history.number
    assert second != first
    for training, number in ((True, first), (False, second)):
        model.train(training)
        assert history.observe() is None
        assert history.number == number


def test_a_hyperparameter_comes_with_values_and_advice() -> None:
    """The message has the values; the reason, which calls are counted under, has not, for there is one per step."""
    _, optimizer, history = observed()
    optimizer.param_groups[0]["momentum"] = 0.8
    change = history.observe()
    assert change is not None
    assert change.reason == "param_groups[0]['momentum'] changed"
    assert change.text == "param_groups[0]['momentum'] changed from 0.9 to 0.8"
    assert "cycle_momentum=False" in change.advice["param_groups[0]['momentum']"]


def test_no_number_comes_twice() -> None:
    """Behind a replacement of memory, and behind more settings than are remembered, old numbers stay unused: a graph
    that is still there by then is never found again."""
    model, optimizer, history = observed()
    numbers = [history.number]
    model.weight = nn.Parameter(torch.ones(2, 2))
    change = history.observe()
    assert change is not None
    assert (change.outdates, change.reason) == (True, "model.weight was replaced")
    assert (history.call_settings.replacements, history.call_settings.replaced) == (
        1,
        "model.weight was replaced",
    )
    numbers.append(history.number)
    outdated = []
    for i in range(70):
        optimizer.param_groups[0]["momentum"] = 0.001 * i
        change = history.observe()
        assert change is not None
        outdated.append(change.outdates)
        numbers.append(history.number)
    assert sum(outdated) == 2
    history.forget()
    assert history.observe() is None
    assert len({*numbers, history.number}) == 73


def test_a_look_that_is_interrupted_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8: after an interrupt during the comparison, the next call finds the change."""
    model, _, history = observed()
    model.weight = nn.Parameter(torch.ones(2, 2))

    def interrupted(self: Generation, new: Generation) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Generation, "replaced_in", interrupted)
        with pytest.raises(KeyboardInterrupt):
            history.observe()
    change = history.observe()
    assert change is not None
    assert change.outdates


def test_optimizers_are_told_apart() -> None:
    """Of several optimizers the message says which one it is."""
    modules = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    history = SettingsHistory(TrainingState({f"modules[{i}]": part for i, part in enumerate(modules)}, optimizers))
    history.observe()
    optimizers[1].param_groups[0]["momentum"] = 0.8
    change = history.observe()
    assert change is not None
    assert change.reason == "optimizers[1].param_groups[0]['momentum'] changed"


def causes(*batches: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    history = SettingsHistory(TrainingState({}, []))
    history.observe()
    calls = [
        (Key(read_batch(args, kwargs, torch.device("cpu"))[0], None, 0), history.call_settings)
        for args, kwargs in batches
    ]
    return Variation(torch.device("cuda", 1), 3, False).explain(calls)


@pytest.mark.parametrize(
    ("batches", "examples", "advice"),
    [
        (
            [((torch.zeros(2, 3),), {}), ((torch.zeros(3, 2).t(),), {})],
            "batch[0] kept changing (it was (2, 3) float32 on cpu, then (2, 3) float32 on cpu with strides (1, 2))",
            "Pass batch[0].contiguous().",
        ),
        (
            [((torch.zeros(2),), {}), ((torch.zeros(2).half(),), {})],
            "batch[0] kept changing (it was (2,) float32 on cpu, then (2,) float16 on cpu)",
            "Pass batch[0] in one dtype.",
        ),
        (
            [((), {"mask": torch.zeros(2)}), ((), {"mask": None})],
            "batch['mask'] kept changing (it was (2,) float32 on cpu, then None)",
            "Pass a tensor as batch['mask'] in each call.",
        ),
        (
            [((), {"k": 1}), ((), {"k": True}), ((), {"k": None})],
            "batch['k'] kept changing (it was 1, then True, then None)",
            "Pass a number that varies as a tensor, torch.tensor(x, device='cuda:1'), or take it out of the batch if "
            "the step does not compute with it.",
        ),
        (
            [((), {"k": "a" * 100}), ((), {"k": b"b"})],
            f"batch['k'] kept changing (it was 'aaaaaaaaaaaaaaaaaa..{'a' * 38}', then b'b')",
            "Take batch['k'] out of the batch that you pass to the step: a graph computes with tensors only.",
        ),
    ],
    ids=["strides", "dtype", "sometimes None", "number", "text"],
)
def test_words_for_a_leaf(batches: Any, examples: str, advice: str) -> None:
    """R9: the advice depends on the kind of leaf, and on how its values differ."""
    cause = causes(*batches)
    assert (cause.examples, cause.advice) == (examples, advice)
