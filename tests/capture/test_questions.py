"""Questions that a step asks the device about its input: asked ahead of a replay, and what is still named."""

import ctypes
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic, training_state
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit._capture.host.given_numbers import AHEAD
from ampkit._capture.host.host_tensors import HostTensors
from ampkit._capture.host.uploads import Uploads, content_of
from ampkit._capture.preflight import questions
from ampkit._capture.preflight.watched_call import WatchedCall
from ampkit._torch.tensors import operators
from ampkit._torch.tensors.host_counts import Count
from ampkit._torch.tensors.tensors import storage_address

Engine = tuple[str, str]
CLASSES, PADDING = 4, 9


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


class Net(nn.Module):
    """A layer with a dropout; `ask` may look at the batch."""

    def __init__(self, ask: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, CLASSES), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.tensor(4))
        self.ask, self.first, self.limit = ask, None, 0.5

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return self.drop(self.ask(self, self.fc(x), mask, y))


def batches(device: str, calls: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    for i in range(calls):
        x = torch.rand(4, 4, generator=made) * (1 + (i % 3 == 0))
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[:, 2] = i % 5 != 0
        yield x.to(device), mask.to(device), torch.randint(CLASSES, (4,), generator=made).to(device)


def trained(
    ask: Callable[[Any, Tensor, Tensor, Tensor], Tensor], engine: Engine, calls: int = 40, bad: int = -1, **options: Any
) -> tuple[list[Any], Any, list[str]]:
    """Return loss and state after each call, the report, and the warnings. In call `bad` a label is out of range."""
    device, graph = engine
    torch.manual_seed(0)
    net = Net(ask).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-6, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x, mask, y), y.clamp(max=CLASSES - 1))

    step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, **options)
    history: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, (x, mask, y) in enumerate(batches(device, calls)):
            if i == bad:
                y[1] = PADDING
            try:
                history.append((step(x, mask, y).loss, training_state(net, optimizer, step.scaler)))
            except ValueError as error:
                history.append((str(error), training_state(net, optimizer, step.scaler)))
    report = step.report()
    step.close()
    return history, report, [str(w.message) for w in caught if issubclass(w.category, ampkit.CaptureWarning)]


def checks_labels(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if y.max() >= CLASSES:
        raise ValueError("a label is out of range")
    return h


def several(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if not mask.all():
        h = h * mask
        if y[0] > 1:
            h = h + 1.0
    return h * 2.0 if 0 in y[-2:] else h


WAYS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "check of labels": checks_labels,
    "padding": lambda net, h, mask, y: h if mask.all() else h * mask,
    "any item": lambda net, h, mask, y: h * 0.5 if (y == 3).any().item() else h,
    "number on the host": lambda net, h, mask, y: h * 0.5 if y.float().mean() > net.limit + 1.0 else h,
    "compared item": lambda net, h, mask, y: h * 0.5 if y.float().mean().item() > net.limit + 1.0 else h,
    "compared with infinity": lambda net, h, mask, y: h if (y / y.max()).sum().item() < math.inf else h * 0.5,
    "whole number": lambda net, h, mask, y: h * 0.5 if y.max().item() == CLASSES - 1 else h,
    "equal": lambda net, h, mask, y: h if torch.equal(mask[0], torch.ones_like(mask[0])) else h * mask,
    "is in": lambda net, h, mask, y: h * 0.5 if 3 in y else h,
    "entry": lambda net, h, mask, y: h * 0.5 if mask[0, 2] else h,
    "several": several,
    "nan": lambda net, h, mask, y: h if (y + 0.0).masked_fill(y == 3, float("nan")).isnan().any() else h * 0.5,
    "made anew": lambda net, h, mask, y: h if (torch.ones_like(mask) & mask).all() else h * mask,
    "limits made anew": lambda net, h, mask, y: h * 0.5 if (y == torch.arange(4, device=y.device)).any() else h,
    "constants alone": lambda net, h, mask, y: h * 0.5 if torch.full((4,), 2, device=y.device).sum() > 7 else h,
}


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
def test_a_question_about_the_input_is_asked_ahead(engine: Engine, ask: Any) -> None:
    """D3: each combination of answers has a graph of its own; the bits are eager's, whatever is asked."""
    expected, _, _ = trained(ask, (engine[0], "off"))
    history, report, messages = trained(ask, engine)
    assert messages == []
    assert report.failure is None
    assert report.replays >= 40 - 3 - 3 * 4  # at most five combinations of answers
    assert report.captures > 0
    assert ("questions to the device" in str(report)) is (ask is not WAYS["constants alone"])
    assert_same(history, expected)


def test_about_constants_alone_nothing_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: the answer is always the same, so the device is asked once for it, and not ahead of each call."""
    asked, item = [], Tensor.item

    def counted(tensor: Tensor) -> Any:
        asked.append(tensor)
        return item(tensor)

    monkeypatch.setattr(Tensor, "item", counted)
    _, report, _ = trained(WAYS["constants alone"], engine)
    assert report.captures == 1
    assert len(asked) <= 3  # two calls under the preflight are checked, and the first call behind them


def size_of_constants(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    places = torch.arange(1, 6, device=h.device)
    return h * torch.arange(places[-2], device=h.device)  # read by C++


def item_of_constants(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    wide = torch.ones_like(mask[0], dtype=torch.float32).sum().item() if mask.all() else 2.0
    return h.reshape(int(torch.full((), 2, device=h.device)), -1, 4).reshape(-1, 4) * wide


def item_of_constants_on_the_host(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = torch.prod(torch.tensor(list(h.shape)))  # on the host, on any device
    return h * int(torch.ones((), device=h.device, dtype=torch.int64) * rows)


def nan_of_constants(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    limit = torch.full((), float("nan"), device=h.device).item()
    return h if limit < 1.0 else h * 0.5


CONSTANTS = [size_of_constants, item_of_constants, item_of_constants_on_the_host, nan_of_constants]


@pytest.mark.parametrize("ask", CONSTANTS, ids=lambda ask: ask.__name__)
def test_numbers_of_constants(engine: Engine, ask: Any) -> None:
    """D3: a number that is always the same is read in the calls before the capture, and then known."""
    expected, _, _ = trained(ask, (engine[0], "off"))
    history, report, messages = trained(ask, engine)
    assert (messages, report.failure) == ([], None)
    assert report.replays >= 30
    assert_same(history, expected)


def of_a_batch(x: Tensor, rows: Tensor) -> Tensor:
    return (x > 0).sum() * rows


def uploaded_first(x: Tensor, rows: Tensor) -> Tensor:
    return rows.to(x.device) + torch.ones((), device=x.device, dtype=torch.int64) * rows


def address_given_out(x: Tensor, rows: Tensor) -> Tensor:
    rows.data_ptr()
    return torch.ones((), device=x.device, dtype=torch.int64) * rows


def address_of(tensor: Tensor) -> int:
    """Return one for each memory, also where there is none."""
    return storage_address(tensor) or tensor.untyped_storage()._cdata


BESIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Any]] = {  # with the numbers that are given
    "of constants": (lambda x, rows: torch.ones((), device=x.device, dtype=torch.int64) * rows, [(16,)]),
    "uploaded first": (uploaded_first, [(16,)]),
    "of a batch": (of_a_batch, [(AHEAD,)]),
    "address given out": (address_given_out, None),
}


@pytest.mark.parametrize("case", BESIDE)
@pytest.mark.parametrize(
    "made", [lambda: torch.tensor(16), lambda: torch.prod(torch.tensor([4, 4]))], ids=["made there", "computed there"]
)
def test_constants_of_the_host_beside_the_device(
    made: Callable[[], Tensor], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: an operation of the device takes a number of constants from the host, and what it computes is one, too.

    The device is one without memory, where a number is read as 16.
    """
    compute, expected = BESIDE[case]
    monkeypatch.setattr(Count, "read", lambda count: 16)
    for module in (operators, questions):
        monkeypatch.setattr(module, "storage_address", address_of)
    device = torch.device("meta")
    x = torch.empty(4, device=device)
    uploads = Uploads(device, HostTensors())
    monkeypatch.setattr(uploads, "constant", lambda tensor: content_of(tensor) and None)
    call = WatchedCall(device, [x], {}, uploads)
    with call.preflight, call.recording():
        call.questions.knows_numbers(operators.READ, (compute(x, made()),), {})
    asked = call.questions.asked()
    assert (None if asked is None else [*asked.numbers]) == expected


def selects(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = mask[:, 2]  # all of them, or none
    h = h.clone()
    h[rows] = h[rows] * 2.0 + h[rows, :].sum()
    return h + h.masked_select(mask).mean() + h[:, mask[0]].sum(1, keepdim=True)


def scatters(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = mask[:, 2:3]  # all of them, or none
    return h.masked_scatter(rows, h.flip(0) * 2) + h.masked_scatter(mask, h.repeat(2, 1) * 3)


def lists(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    wide, *_ = mask.sum(1).tolist()
    h = torch.cat([part * 2.0 for part in h.split([*(mask.sum(0) // 4).tolist()[:2], 2])])
    return h * torch.tensor([[wide, 1], [mask.sum(), wide]], device=h.device).sum()


def sizes(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    longest = mask.sum(1).max()
    padded = torch.zeros(4, longest, device=h.device) + torch.arange(longest, device=h.device)
    repeated = h.repeat_interleave(mask.sum(1) - 2, dim=0).view(4, -1, 4).mean(1)
    return repeated * padded.sum() + len(f"{longest}") + h[: longest - 2].sum()


def places(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, columns = torch.where(mask)
    first = mask.nonzero()[:: mask.sum() // 4]
    last = columns.view(4, -1)[:, -1].max().item()  # asked of what was selected
    return h + h[rows, columns].sum() * int(last) + h[tuple(first.t())].view(4, 1)


def kept_numbers(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    h = h.view(int(net.rows), -1).repeat(1, net.rows)[:, : net.rows]
    return h * 2.0 if net.rows < mask.sum() - 10 else h


def stacks(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    sums = torch.tensor([h.sum(), net.fc.weight.min()], device=h.device)
    return h * sums.max() * torch.tensor([h.argmax()], device=h.device)


def often_other(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if mask.all():
        return h
    return h * (y + 2**62)[0].item() / 2**62 + sum(map(Tensor.item, y))


@pytest.mark.parametrize("ask", [selects, scatters, lists, sizes, places, kept_numbers], ids=lambda ask: ask.__name__)
def test_whole_numbers_are_asked_ahead(engine: Engine, ask: Any) -> None:
    """D3: numbers that Python or an operation reads, as sizes or in a list, choose the graph; also in the backward."""
    expected, _, _ = trained(ask, (engine[0], "off"))
    history, report, messages = trained(ask, engine)
    assert (messages, report.failure) == ([], None)
    assert report.graphs == 2
    assert report.replays >= 40 - 3 - 3 * 2
    assert_same(history, expected)


def test_a_slice_whose_bound_is_a_tensor() -> None:
    """D3: what is noted of it reads no number, and takes no answer of the questions behind it."""
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        out = model(x)[:, : lengths.max()]
        return out.sum() * 2 if (lengths > 1).all() else out.sum()

    step = ampkit.graphed_step(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), graph="emulate")
    for i in range(12):
        step(torch.ones(3, 4), torch.tensor([2, 3, 1 + i % 2]))
    report = step.report()
    assert (report.failure, report.captures, report.replays) == (None, 2, 4)


def repeats(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    times = torch.where(y == PADDING, -1, 1) + (y == PADDING).sum() * (torch.arange(4, device=y.device) == 0) * 2
    try:
        return h.repeat_interleave(times, dim=0)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def test_an_error_of_an_operation_that_is_given_its_number(engine: Engine) -> None:
    """D3: with a negative number among them, the repeats have the same sum."""
    bad = 17
    expected, _, _ = trained(repeats, (engine[0], "off"), bad=bad)
    history, report, messages = trained(repeats, engine, bad=bad)
    assert messages == []
    assert "negative" in history[bad][0]
    assert report.replays >= 34
    assert_same(history, expected)


def test_numbers_in_a_buffer_that_another_call_finds_changed(engine: Engine) -> None:
    """D3: each call asks anew, so what the script writes there between two calls counts."""
    device, graph = engine
    found = []
    for way in ("off", graph):
        torch.manual_seed(0)
        net = Net(kept_numbers).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = ampkit.graphed_step(lambda model, *batch: model(*batch).square().mean(), net, optimizer, graph=way)
        for i, batch in enumerate(batches(device, 36)):
            net.rows.fill_(2 if 12 <= i < 24 else 4)
            found.append((bits(step(*batch).loss), training_state(net, optimizer, step.scaler)))
        report = step.report()
    assert report.graphs >= 2
    assert report.replays >= 12
    assert_same(found[36:], found[:36])


def counts_calls(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    h = h * 2.0 if net.rows < 20 else h
    net.rows.add_(1)
    return h


def test_a_buffer_that_the_step_changes_is_asked_at_a_cut(engine: Engine) -> None:
    """D3: behind the call it has another answer, and each call has others."""
    expected, _, _ = trained(counts_calls, (engine[0], "off"))
    history, report, messages = trained(counts_calls, engine)
    assert messages == []
    assert report.eager["another answer to a question than the graph was captured with"] > 0
    assert report.replays >= 24
    assert_same(history, expected)


def weighted(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    wide = h[mask[:, 2]].repeat(400, 3) if mask[0, 2] else h.repeat(300, 3)
    labels = torch.arange(len(wide), device=h.device).remainder(7)
    labels = labels.masked_fill(labels == 5, -100)
    weight = torch.linspace(0.1, 1.3, 12, device=h.device)
    return h * nn.functional.cross_entropy(wide, labels, weight=weight, label_smoothing=0.1)


def test_a_loss_that_is_another_one_under_a_mode_is_named(engine: Engine) -> None:
    """D3: torch adds the weights in another order where a dispatch mode gives operations their numbers."""
    expected, _, _ = trained(weighted, (engine[0], "off"), calls=12)
    history, report, messages = trained(weighted, engine, calls=12, on_failure="eager")
    assert report.replays == 0
    assert "cross_entropy with class weights and label smoothing" in messages[0]
    assert_same(history, expected)


def test_a_list_of_tensors_is_a_stack(engine: Engine) -> None:
    """D3: torch would read each of them. No number is asked, whatever they are made of."""
    expected, _, _ = trained(stacks, (engine[0], "off"))
    history, report, messages = trained(stacks, engine)
    assert (messages, report.graphs) == ([], 1)
    assert report.replays >= 34
    assert_same(history, expected)


def test_whole_numbers_that_seldom_come_again(engine: Engine) -> None:
    """D3: a graph for each of them within the limit, and eager steps otherwise."""
    expected, _, _ = trained(often_other, (engine[0], "off"))
    history, report, _ = trained(often_other, engine)
    assert report.failure is None
    assert 24 <= report.replays < 38  # of the calls that ask for no number, 32
    assert_same(history, expected)


def of_another_number(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * (1 + (y * torch.tensor([1, 4, 16, 64], device=y.device)).sum().item())


def test_whole_numbers_that_keep_changing(engine: Engine) -> None:
    """D3: then nothing is asked ahead any more, and the line is named."""
    expected, _, _ = trained(of_another_number, (engine[0], "off"), calls=120)
    history, report, messages = trained(of_another_number, engine, calls=120, on_failure="eager")
    assert any("more than 64 different answers" in message for message in messages)
    assert "test_questions.py:" in messages[-1]
    assert report.replays < 16
    assert_same(history, expected)


def beside_a_draw(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if mask.all():
        h = h * 2.0
    return h + 1.0 if torch.rand(()) < net.limit else h


def behind_a_draw(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if torch.rand(()) < net.limit and not mask.all():
        h = h * mask
    return h


@pytest.mark.parametrize("plain", ENGINES)
@pytest.mark.parametrize("ask", [beside_a_draw, behind_a_draw])
def test_with_a_draw_on_the_host(plain: Engine, ask: Any) -> None:
    """D3, R3: outcomes of draws and answers together choose the graph; what is asked may depend on what was drawn."""
    with deterministic():  # without a tape, whose replays do not draw
        expected, _, _ = trained(ask, (plain[0], "off"), 80)
        history, report, messages = trained(ask, plain, 80)
    assert messages == []
    assert report.graphs == 4 if ask is beside_a_draw else 3
    assert report.replays >= 80 - 4 * report.graphs - 2
    assert "questions to the device" in str(report)
    assert "draws on the host" in str(report)
    assert_same(history, expected)


@pytest.mark.parametrize("plain", ENGINES)
@pytest.mark.parametrize("either", [True, False])
def test_a_draw_behind_an_answer_is_named(plain: Engine, either: bool) -> None:
    """D3, R3: with some answers the step draws nothing. What is drawn ahead would move the generator."""

    def ask(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        at_hand = y.max() >= CLASSES - 1
        chosen = at_hand or torch.rand(()) < net.limit if either else at_hand and torch.rand(()) < net.limit
        return h * 2.0 if chosen else h

    with deterministic():
        expected, _, _ = trained(ask, (plain[0], "off"), 60)
        history, _, messages = trained(ask, plain, 60)
    assert any("draws on the host have changed" in message for message in messages)
    assert_same(history, expected)


def test_a_check_that_raises(engine: Engine) -> None:
    """D3: a label out of range raises the user's own error, nothing of the step is done, and training goes on."""
    expected, _, _ = trained(checks_labels, (engine[0], "off"), bad=20)
    history, report, messages = trained(checks_labels, engine, bad=20)
    assert history[20][0] == "a label is out of range"
    assert messages == []
    assert report.captures == 1
    assert report.replays >= 40 - 4 - 1  # the first call makes state, two are looked at, one is the rehearsal
    assert_same(history, expected)


OPTIONS: list[dict[str, Any]] = [{"policy": "float16"}, {"accumulate": 2}, {"verify": 4}, {"warmup": 6}]
OPTIONS += [{"policy": ampkit.Policy(compute="bfloat16", ops={"exp": "bfloat16"})}]  # asked through a function mode


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_options(engine: Engine, options: dict[str, Any]) -> None:
    """D3: with a loss scale, in windows, verified, and in a longer warm-up."""
    expected, _, _ = trained(several, (engine[0], "off"), **{**options, "verify": 0})
    history, report, _ = trained(several, engine, **options)
    assert report.failure is None
    assert report.replays > 10
    assert_same(history, expected)


def of_weights(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if (0.0 * h.max() + net.calls) % 11 > 9 else h


def of_a_compared_weight(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if (0.0 * h.max() + net.calls).item() % 11 > 9 or h.max().item() > 1e6 else h


def of_a_compared_loss(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if (0.0 * h.max() + net.calls % 11).item() > 9 else h


def of_equal_weights(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if torch.equal(net.calls % 11, torch.full_like(net.calls, 10.0)) else h


def of_close_weights(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if (net.calls % 11).allclose(torch.full_like(net.calls, 10.1), atol=0.2) else h


def of_a_buffer(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if (net.calls + y.sum()) % 2 == 0 else h


def of_constants_and_inputs(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if torch.ones(3, device=h.device).bool().all():
        h = h * 2.0
    if mask.all():
        h = h * 0.5
    if torch.zeros(2, device=h.device).any() or (y == 0).all():
        h = h + 1.0
    return h


def of_what_was_kept(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if net.first is None:
        net.first = y.sum() % 2
    return h * 0.5 if net.first else h


def of_random_numbers(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if torch.rand_like(h)[0, 0] > 0.5 else h


def of_changed_input(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    y.add_(net.calls.long() % 2)
    return h * 0.5 if y.sum() % 2 == 0 else h


def of_a_float(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * float(y.float().mean().item())


def of_a_compared_number(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h * 0.5 if Fraction(3, 2) < y.float().mean().item() else h


def of_what_no_mode_sees(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flag = torch.zeros(1, dtype=torch.int32, device=h.device)
    if h.is_cuda:
        from unseen_writes import tell_whether_late

        tell_whether_late[(1,)](flag, net.calls)
    else:
        _tell_whether_late(flag.data_ptr(), net.calls)
    return h * 0.5 if flag else h


def _tell_whether_late(address: int, calls: Tensor) -> None:
    late = ctypes.c_float.from_address(calls.data_ptr()).value > 10.0
    ctypes.c_int32.from_address(address).value = late


def of_dlpack(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flag = torch.zeros(1, dtype=torch.int32, device=h.device)
    shared = torch.utils.dlpack.from_dlpack(flag.__dlpack__())
    if h.is_cuda:
        shared.copy_(net.calls > 10.0)
    else:
        _tell_whether_late(shared.untyped_storage().data_ptr(), net.calls)
    return h * 0.5 if flag else h


def of_uninitialized_memory(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flag = torch.empty(1, device=h.device)
    return h * 0.5 if flag.fill_(1.0) else h


def keeps_an_answer(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    before, net.limit = net.limit, float(bool(mask.all()))
    return h * 0.5 if before else h


def of_a_scatter(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return h.masked_scatter(h > 0, h * 2)


NUMBERS = [of_a_compared_number, of_a_compared_weight, of_a_float, of_a_scatter]
RARELY = [of_weights, of_a_compared_loss, of_equal_weights, of_close_weights, of_what_was_kept, of_uninitialized_memory]
OFTEN = [of_a_buffer, of_random_numbers, of_changed_input]


UNSEEN = [of_what_no_mode_sees, of_dlpack]  # by a tape, too, on which no kernel writes


@pytest.mark.parametrize("plain", ENGINES)
@pytest.mark.parametrize("ask", UNSEEN, ids=lambda ask: ask.__name__)
def test_memory_whose_address_is_given_out(plain: Engine, ask: Any) -> None:
    """D3: code that no mode sees may write there, so that no question about it is asked ahead."""
    with deterministic():
        expected, _, _ = trained(ask, (plain[0], "off"))
        history, report, messages = trained(ask, plain)
    assert (messages, report.failure) == ([], None)
    assert report.replays >= 20
    assert_same(history, expected)


@pytest.mark.parametrize("ask", RARELY, ids=lambda ask: ask.__name__)
def test_at_other_questions_the_graph_is_cut(engine: Engine, ask: Any) -> None:
    """D3: what depends on weights, state or earlier batches is asked within a replay. With another answer it is undone,
    and the call is eager; each call is counted."""
    expected, _, _ = trained(ask, (engine[0], "off"))
    history, report, messages = trained(ask, engine)
    assert messages == []
    assert report.failure is None
    assert report.replays >= 20
    assert report.replays + sum(report.eager.values()) == 40
    assert_same(history, expected)


@pytest.mark.parametrize("ask", [ask for ask in RARELY if ask is not of_what_was_kept], ids=lambda ask: ask.__name__)
def test_without_cuts_the_line_is_named(engine: Engine, ask: Any) -> None:
    """D3: `cuts=False`, where no call may wait for the device."""
    expected, _, _ = trained(ask, (engine[0], "off"), calls=12)
    history, report, messages = trained(ask, engine, calls=12, on_failure="eager", cuts=False)
    assert report.replays == 0
    assert "test_questions.py:" in " ".join(messages)
    assert_same(history, expected)


def indexes(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if net.calls % 5 != 1:
        table = torch.arange(CLASSES, device=y.device)
        if table.index_select(0, y + CLASSES * (~mask[:, 2]).long()).max() > 1:  # out of range in the other calls
            return h * 0.5
    return h


def asks_less_from_some_call_on(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if net.calls < 14:
        if torch.ones(3, device=y.device).all() and not mask.all():
            return h * mask
        return h + 1.0
    return h if y.max() < CLASSES else h * 2.0


@pytest.mark.parametrize("ask", [indexes, asks_less_from_some_call_on])
def test_what_is_asked_behind_a_cut_is_not_asked_ahead(engine: Engine, ask: Any) -> None:
    """D3: whether it is asked at all depends on the answer there, and so does what code may run."""
    expected, _, _ = trained(ask, (engine[0], "off"), calls=24)
    history, report, messages = trained(ask, engine, calls=24)
    assert_same(history, expected)
    assert messages == []
    assert report.failure is None
    assert report.eager["another answer to a question than the graph was captured with"] > 0
    assert report.replays > 8


def test_what_cuts_may_be() -> None:
    """R8: a flag."""
    with pytest.raises(ValueError, match="cuts="):
        trained(of_weights, ("cpu", "off"), calls=1, cuts="exact")


@pytest.mark.parametrize("ask", OFTEN, ids=lambda ask: ask.__name__)
def test_answers_that_keep_changing(engine: Engine, ask: Any) -> None:
    """D3: then nothing is cut any more, and the line is named."""
    expected, _, _ = trained(ask, (engine[0], "off"))
    history, report, messages = trained(ask, engine, on_failure="eager")
    assert "often has another answer" in messages[0]
    assert "test_questions.py:" in messages[1]
    assert report.replays <= 16
    assert report.replays + sum(report.eager.values()) == 40
    assert_same(history, expected)


class Normed(Net):
    """BatchNorm from a call on, in front of a check. torch does not count what it writes to its running statistics."""

    def __init__(self, since: int) -> None:
        super().__init__(lambda *_: torch.empty(()))
        self.norm, self.since = nn.BatchNorm1d(4), since

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1.0)
        h: Tensor = self.fc(x)
        if self.calls > self.since:
            h = self.norm(h)
        if ((h.detach() * 0 + y.view(-1, 1)) == PADDING).any():
            raise ValueError("a label is out of range")
        return h


def trained_with_norm(engine: Engine, since: int, bad: set[int]) -> list[Any]:
    """Return the state after each call. In the calls in `bad` the check raises."""
    device, graph = engine
    torch.manual_seed(0)
    net = Normed(since).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-6, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x, mask, y), y.clamp(max=CLASSES - 1))

    history = []
    with ampkit.graphed_step(loss_fn, net, optimizer, graph=graph) as step:
        for i, (x, mask, y) in enumerate(batches(device, 24)):
            if i in bad:
                y[1] = PADDING
            with pytest.raises(ValueError, match="out of range") if i in bad else nullcontext():
                step(x, mask, y)
            history.append(training_state(net, optimizer, step.scaler))
        assert graph == "off" or step.report().replays >= 12
    return history


@pytest.mark.parametrize("first", [3, 4, 5])
def test_a_replay_that_is_undone_before_another_capture(engine: Engine, first: int) -> None:
    """D3: what is put back has been written as torch counts it. The next graph puts back the same tensors."""
    bad = {first, 16, 20}
    assert_same(trained_with_norm(engine, 0, bad), trained_with_norm((engine[0], "off"), 0, bad))


@pytest.mark.parametrize("since", [1, 2, 3])
def test_a_branch_that_was_not_taken_at_first(engine: Engine, since: int) -> None:
    """D3: the first call under the preflight has not written what the captured branch writes."""
    bad = {16, 20}
    assert_same(trained_with_norm(engine, since, bad), trained_with_norm((engine[0], "off"), since, bad))


def test_what_is_written_through_data_is_put_back(engine: Engine) -> None:
    """D3: as the weights of a teacher in front of a question. torch counts no such write."""
    device, graph = engine
    found = []
    for way in ("off", graph):
        torch.manual_seed(0)
        student, teacher = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, fused=True)

        def step(
            x: Tensor, flag: Tensor, student: Any = student, teacher: Any = teacher, opt: Any = optimizer
        ) -> Tensor:
            opt.zero_grad()
            loss = student(x).square().mean()
            loss.backward()
            opt.step()
            for mean, param in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.data.mul_(0.5).add_(param.data)
            if loss.detach() * 0 + flag > 0:
                return loss.detach() * 2.0
            return loss.detach()

        called = ampkit.graphed(modules=(student, teacher), optimizers=(optimizer,), graph=way)(step)
        for i, (x, _, _) in enumerate(batches(device, 24)):
            flag = torch.full((), float(i in (12, 20)), device=device)
            found.append((called(x, flag), [bits(param) for param in teacher.parameters()]))
        assert way == "off" or called.report().replays >= 16
    assert_same(found[24:], found[:24])


@pytest.mark.parametrize("ask", NUMBERS, ids=lambda ask: ask.__name__)
def test_other_reads_are_named(engine: Engine, ask: Any) -> None:
    """D3: what needs the number is named by line."""
    expected, _, _ = trained(ask, (engine[0], "off"), calls=16)
    history, report, messages = trained(ask, engine, calls=16, on_failure="eager")
    assert report.replays == 0
    assert "test_questions.py:" in " ".join(messages)
    assert_same(history, expected)


def sticky(net: Any, h: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    if (y == 0).sum() >= 3:
        net.limit = 2.0
    return h * net.limit


@pytest.mark.parametrize("ask", [keeps_an_answer, sticky], ids=lambda ask: ask.__name__)
def test_what_is_written_by_an_answer(engine: Engine, ask: Any) -> None:
    """D3: a number on the host that depends on an answer, and that later calls read: a replay writes it, or is none."""
    expected, _, _ = trained(ask, (engine[0], "off"), calls=60)
    history, report, messages = trained(ask, engine, calls=60)
    assert messages or report.replays >= 30
    assert_same(history, expected)


@pytest.mark.parametrize("has_mode", [False, True])
def test_a_constant_among_the_questions(engine: Engine, has_mode: bool) -> None:
    """D3: what is asked of constants is not asked again in a replay. In a mode, calls have the bits of eager ones."""
    with torch.device("cpu") if has_mode else nullcontext():
        expected, _, _ = trained(of_constants_and_inputs, (engine[0], "off"), calls=24)
        history, report, messages = trained(of_constants_and_inputs, engine, calls=24)
    assert_same(history, expected)
    assert report.replays >= 12, messages


def test_of_two_arguments_in_the_same_memory(engine: Engine) -> None:
    """D3: it cannot be told which one is asked about, so the line is named."""
    device, graph = engine
    found = []
    for way in ("off", graph):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)

        def loss_fn(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = model(a) * 2.0 if a.mean() > 0.6 else model(a) * b
            return out.square().mean()

        step = ampkit.graphed_step(loss_fn, layer, optimizer, graph=way)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            for i, (x, _, _) in enumerate(batches(device, 24)):
                step(x, x if i < 8 else x.flip(0) + 0.5)
        found.append(training_state(layer, optimizer, step.scaler))
        step.close()
    assert_same(*found)


def test_a_scan_makes_such_steps_one_by_one(engine: Engine) -> None:
    """D3: with the bits of single calls."""
    device, graph = engine
    made = list(batches(device, 24))
    found = []
    for way, scans in (("off", False), (graph, True)):
        torch.manual_seed(0)
        net = Net(several).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-6, fused=True)
        step = ampkit.graphed_step(
            lambda model, x, mask, y: nn.functional.cross_entropy(model(x, mask, y), y), net, optimizer, graph=way
        )
        if scans:
            for start in range(0, 24, 4):
                step.scan(*map(torch.stack, zip(*made[start : start + 4], strict=True)))
            assert (step.report().launches, step.report().failure) == (0, None)
            assert step.report().replays > 0
        else:
            for each in made:
                step(*each)
        found.append(training_state(net, optimizer, step.scaler))
        step.close()
    assert_same(*found)


def test_in_a_function(engine: Engine) -> None:
    """D3: `ampkit.graphed` asks ahead, too."""
    device, graph = engine
    layer = nn.Linear(4, 4).to(device)

    @ampkit.graphed(modules=(layer,), graph=graph)
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = layer(x)
        return out if mask.all() else out * mask

    for x, mask, _ in batches(device, 30):
        out = layer(x)
        assert_same(fn(x, mask).detach(), (out if mask.all() else out * mask).detach())
    report = fn.report()
    assert (report.failure, report.captures) == (None, 2)
    assert report.replays >= 30 - 2 * 3
