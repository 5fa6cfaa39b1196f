"""find_syncs: each line that makes the host wait, by the time waited, with what to write instead."""

import functools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import (
    WAITS,
    assert_same,
    blocking_copy,
    custom_backward,
    line_of,
    make_net,
    marked_line,
    new_tensor,
    pageable_copy,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit.debug import Syncs, find_syncs

OFF = ampkit.GradScaler("cpu", enabled=False)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU, so that the test runs on any machine as on one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def python_random() -> Iterator[None]:
    before = random.getstate()
    yield
    random.setstate(before)


def on_meta() -> Syncs:
    """Return a finder for which the meta device is the one with the GPU: tensors can be copied to it."""
    found = Syncs()
    found._preflight = type(found._preflight)(torch.device("meta"), graphed=False)
    return found


marked = functools.partial(marked_line, __file__)


# ------------------------------------------------------------------------- the rows of "What sees a host sync" (DESIGN)


def item(x: Tensor) -> None:
    x.sum().item()  # HERE item


def if_tensor(x: Tensor) -> None:
    if x.sum() > 1e9:  # HERE if_tensor
        raise AssertionError


def nonzero(x: Tensor) -> None:
    x.nonzero()  # HERE nonzero


def boolean_mask(x: Tensor) -> None:
    x[x > 0]  # HERE boolean_mask


def to_cpu(x: Tensor) -> None:
    x.cpu()  # HERE to_cpu


Row = Callable[[Tensor], None]
ON_CPU: dict[Row, str] = {
    item: "waits for the device to read a value",
    if_tensor: "waits for the device to read a value",
    nonzero: "the shape of its result depends on data",
    boolean_mask: "a boolean mask as an index waits for the device",
}
ON_CUDA: dict[Row, str] = {
    **ON_CPU,
    to_cpu: "copies from the device to pageable host memory",
    **WAITS,
}
NOT_MEASURED = {new_tensor}


def check(row: Row, what: str, x: Tensor) -> None:
    found = find_syncs(row, x)
    assert found
    assert {finding.line for finding in found.findings} == {line_of(row)}
    (finding,) = (finding for finding in found.findings if what in finding.what)
    assert "aux" not in finding.advice  # which a graphed step has
    assert finding.count == 1
    assert (finding.ms is None) == (row in NOT_MEASURED)
    assert found.graph_only == []


@pytest.mark.parametrize(("row", "what"), ON_CPU.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_x2_the_line_of_each_kind(row: Row, what: str, cpu: None) -> None:
    """X2: what can be seen without a GPU is named, with the user's line, once, and timed."""
    check(row, what, torch.ones(3, 4))


@pytest.mark.cuda
@pytest.mark.parametrize(("row", "what"), ON_CUDA.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_x2_the_line_of_each_kind_on_cuda(row: Row, what: str) -> None:
    """X2: every row of the table is named, with the user's line, once, and timed but for `torch.tensor`."""
    x = torch.ones(3, 4, device="cuda")
    row(x)
    check(row, what, x)


@pytest.mark.cuda
def test_x2_time_waited_on_cuda() -> None:
    """X2: a read behind much work waits for it, and takes the time of that; `checked_on` says where it was."""
    x = torch.randn(4096, 4096, device="cuda")
    (x @ x).sum().item()

    def work() -> None:
        y = x
        for _ in range(20):
            y = x @ y / 64
        y.sum().item()  # HERE behind_work
        y.sum().item()  # HERE behind_nothing

    found = find_syncs(work)
    assert (found.checked_on, found.unseen) == ("cuda", ())
    assert [finding.line for finding in found.findings] == [marked("behind_work"), marked("behind_nothing")]
    assert "no CUDA device" not in str(found)


@pytest.mark.cuda
def test_x2_pinned_copies_on_cuda() -> None:
    """X2: a copy of pinned memory that does not block is nothing to wait for; one that blocks is."""
    pinned = torch.ones(5).pin_memory()

    def copies() -> None:
        pinned.to("cuda", non_blocking=True)  # HERE pinned_free
        pinned.to("cuda")  # HERE pinned_blocking

    found = find_syncs(copies)
    assert [finding.line for finding in found.findings] == [marked("pinned_blocking")]
    assert [finding.line for finding in found.graph_only] == [marked("pinned_free")]


def test_x2_copies_to_a_device(cpu: None) -> None:
    """X2: pageable copies, blocking or not, are named with what to write instead (the meta device stands for CUDA)."""
    with on_meta() as found:
        blocking_copy(torch.empty(0, device="meta"))
        pageable_copy(torch.empty(0, device="meta"))
    assert {finding.line for finding in found.findings} == {line_of(blocking_copy), line_of(pageable_copy)}
    assert all("ampkit.prefetch" in finding.advice for finding in found.findings)


# --------------------------------------------------------------------------------------------------------- what it does


class Stopping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].grad.sum() != 0:  # HERE optimizer
            return super().step(closure)
        return None


def test_x2_forward_backward_and_optimizer(cpu: None) -> None:
    """X2: lines of all three are named in one run, which leaves what a run without leaves, and `fn`'s result."""

    def train(find: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
        model = make_net("cpu")
        optimizer = Stopping(model.parameters(), lr=0.1, momentum=0.9)

        def step(images: Tensor, *, scale: float) -> float:
            loss = custom_backward(model(images).sum() * scale)
            value = loss.item()  # HERE forward
            loss.backward()
            optimizer.step()
            return value

        torch.manual_seed(1)
        images = torch.randn(2, 3, 8, 8)
        if not find:
            step(images, scale=0.5)
            return model, optimizer, []
        found = find_syncs(step, images, scale=0.5)
        assert isinstance(found.result, float)
        return model, optimizer, [finding.line for finding in found.findings]

    plain, plain_optimizer, _ = train(False)
    model, optimizer, lines = train(True)
    assert sorted(lines) == sorted([marked("forward"), line_of(custom_backward), marked("optimizer")])
    assert_same(training_state(plain, plain_optimizer, OFF), training_state(model, optimizer, OFF))


def test_longest_waits_come_first(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings and table are sorted by time waited, all times of a line together; without a time, they come last."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("ampkit._capture.preflight.preflight.time", clock)
    original = torch._tensor_str._str

    def slow(tensor: Tensor, **kwargs: Any) -> str:
        clock.now += float(len(tensor))
        return original(tensor, **kwargs)

    monkeypatch.setattr(torch._tensor_str, "_str", slow)
    with on_meta() as found:
        x = torch.empty(3, device="meta")
        torch.ops.aten.lift_fresh(x)  # HERE unknown
        str(x)  # HERE three
        for _ in range(2):
            str(x[:2])  # HERE twice_two
        str(x[:1])  # HERE one
    assert [(finding.line, finding.count, finding.ms) for finding in found.findings] == [
        (marked("twice_two"), 2, 4000.0),
        (marked("three"), 1, 3000.0),
        (marked("one"), 1, 1000.0),
        (marked("unknown"), 1, None),
    ]
    assert found.ms == 8000.0
    head, columns, *rows = str(found).splitlines()
    assert head == "4 lines wait for the device or copy pageable memory, 8000.000 ms in all:"
    assert columns.split() == ["ms", "times"]
    assert rows[0] == f"    4000.000       2  {marked('twice_two')}"
    assert [row.strip() for row in rows[1:3]] == ["prints a tensor, which reads it", "Print it once in many steps."]
    assert rows[9].split()[:2] == ["-", "1"]


def test_a_block(cpu: None) -> None:
    """As a context manager it names the lines of the block, gives findings while it runs, and nobody's outside."""
    x = torch.ones(3)
    with find_syncs() as found:
        assert not found
        assert found.findings == []
        x.sum().item()  # HERE in_block
        assert found
    x.sum().item()
    assert [finding.line for finding in found.findings] == [marked("in_block")]
    assert found.result is None


def test_nothing_found(cpu: None) -> None:
    """It is false then, and says what it cannot know on a machine without a GPU."""
    found = find_syncs(torch.relu, torch.ones(3))
    assert not found
    assert torch.equal(found.result, torch.ones(3))
    assert (found.checked_on, found.ms) == ("cpu", 0)
    head, told, *unseen = str(found).splitlines()
    assert head == "No line waits for the device or copies pageable memory."
    assert told == "There is no CUDA device, so tensors on the CPU were checked instead. That cannot find:"
    assert [row.strip() for row in unseen] == list(found.unseen)
    assert any("torch.cuda.synchronize()" in row for row in unseen)


def test_what_only_a_graph_cannot_hold_is_set_apart(cpu: None, python_random: None) -> None:
    """A draw on the host holds up nothing: it is no finding, but is told."""

    def draw() -> Tensor:
        return torch.ones(3) * random.random()  # HERE draw

    found = find_syncs(draw)
    assert not found
    (only,) = found.graph_only
    assert only.line == marked("draw")
    assert "draws from Python's random" in only.what
    assert f"The host does not wait for these, but a CUDA graph cannot capture them:\n{'ms':>12}" in str(found)


def test_to_dict(cpu: None, python_random: None) -> None:
    """All but the result comes back from JSON as it was."""

    def step() -> None:
        item(torch.ones(3) * random.random())

    found = find_syncs(step)
    told = json.loads(json.dumps(found.to_dict()))
    assert told == {
        "checked_on": "cpu",
        "unseen": list(found.unseen),
        "ms": found.ms,
        "findings": [finding._asdict() for finding in found.findings],
        "graph_only": [finding._asdict() for finding in found.graph_only],
    }
    assert told["findings"][0]["line"] == marked("item")
    assert set(told["findings"][0]) == {"line", "what", "advice", "count", "ms", "graph_only", "caller"}


def test_torchs_own_functions(cpu: None) -> None:
    """Without a line of the user's in it, a wait is on the line that called `find_syncs`, and says where in torch."""
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    clip = functools.partial(nn.utils.clip_grad_norm_, [weight], 1.0)
    found = find_syncs(clip, error_if_nonfinite=True)  # HERE torchs
    (finding,) = found.findings
    assert finding.line == marked("torchs")
    assert "in torch/nn/utils/clip_grad.py:" in finding.what
    with find_syncs() as around:
        clip(error_if_nonfinite=True)  # HERE torchs_in_block
    assert [finding.line for finding in around.findings] == [marked("torchs_in_block")]


def test_around_a_graphed_step(cpu: None) -> None:
    """Warm-up, preflight and capture of a step go on in it, with the bits that they have without."""

    def train(find: bool) -> dict[str, Any]:
        model = make_net("cpu", dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(
            lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer, graph="emulate", warmup=2
        )
        torch.manual_seed(2)
        x, y = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
        if find:
            with find_syncs() as found:
                losses = [step(x, y).loss for _ in range(4)]
            assert found.findings == []
        else:
            losses = [step(x, y).loss for _ in range(4)]
        assert step.report().captures == 1
        return training_state(model, optimizer, OFF) | {"losses": losses}

    assert_same(train(False), train(True))


def test_an_error_passes(cpu: None) -> None:
    """What the function raises is raised as it is, and torch is as before."""
    anomaly, threads = torch.is_anomaly_enabled(), torch._C._is_multithreading_enabled()

    def fails() -> None:
        raise LookupError("a mistake of the user")

    with pytest.raises(LookupError, match=r"^a mistake of the user$"):
        find_syncs(fails)
    assert (torch.is_anomaly_enabled(), torch._C._is_multithreading_enabled()) == (anomaly, threads)


def test_wrong_use(cpu: None) -> None:
    """Each message says what to write."""
    found = find_syncs(item, torch.ones(3))
    with pytest.raises(ValueError, match=r"used already.*with ampkit.debug.find_syncs\(\) as found"), found:
        pass
    with pytest.raises(ValueError, match="expected the function first"):
        find_syncs(None, 3)
