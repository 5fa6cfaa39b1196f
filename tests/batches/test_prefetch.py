"""prefetch: the loader's batches on the device, decoded there, without a wait."""

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from harness import DEVICES, deterministic, make_net, no_sync
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import ampkit

Batch = dict[str, object]


class Loader:
    """Five batches, each of them a tree with tensors and a string."""

    def __init__(self) -> None:
        self.started = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Batch]:
        self.started += 1
        return ({"x": [torch.full((3, 2), float(i))], "name": f"batch {i}"} for i in range(5))


@pytest.mark.parametrize("device", DEVICES)
def test_yields_the_loaders_batches_on_the_device(device: str) -> None:
    """Tensors are moved in their tree and other leaves stay. len is the loader's, and each epoch starts anew."""
    loader = Loader()
    batches = ampkit.prefetch(loader, device)
    assert len(batches) == 5
    for _ in range(2):
        seen = list(batches)
        assert [batch["name"] for batch in seen] == [f"batch {i}" for i in range(5)]
        for i, batch in enumerate(seen):
            (x,) = batch["x"]  # type: ignore[misc]
            assert x.device.type == device
            assert torch.equal(x.cpu(), torch.full((3, 2), float(i)))
    assert loader.started == 2


def test_cpu_batches_are_the_loaders_own() -> None:
    """On the CPU nothing is copied."""
    source = [torch.ones(2)]
    assert next(iter(ampkit.prefetch(source, "cpu"))) is source[0]


def test_a_loader_without_len_has_none() -> None:
    """An iterable dataset has no length, and neither has its prefetcher."""
    batches = ampkit.prefetch((torch.ones(1) for _ in range(2)), "cpu")
    with pytest.raises(TypeError, match="len"):
        len(batches)
    assert len(list(batches)) == 2


def test_an_error_of_the_loader_reaches_the_loop() -> None:
    """The loop gets the batches before the error, and then the error."""

    def broken() -> Iterator[Tensor]:
        yield torch.ones(1)
        raise OSError("disk")

    batches = iter(ampkit.prefetch(broken(), "cpu"))
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk"):
        next(batches)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_that_ends_early_closes_the_loader(device: str) -> None:
    """No batch was taken from the loader beyond the one that the loop had, and the loader's `finally` has run."""
    taken, closed = [], []

    def loader() -> Iterator[Tensor]:
        try:
            for i in range(5):
                taken.append(i)
                yield torch.full((2,), float(i))
        finally:
            closed.append(True)

    for batch in ampkit.prefetch(loader(), device, transform=lambda batch: batch + 1):
        if batch[0] == 2:
            break
    assert taken == [0, 1]
    del batch
    assert closed == [True]


# ------------------------------------------------------------------------------------------------------- other objects


class Encoding(UserDict[str, Any]):
    """Like the BatchEncoding of transformers: a dict-like class with other attributes and its own `to`."""

    def __init__(self, data: dict[str, Any], n_sequences: int) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences

    def to(self, device: Any) -> "Encoding":
        raise AssertionError("it is moved item by item")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Tensor
    more: dict[str, list[Tensor]]
    name: str


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    of: object = None


@attrs.define
class Attrs:
    x: Tensor
    tags: tuple[str, ...]


@attrs.frozen(slots=False)
class FrozenAttrs:
    x: Tensor


class Movable:
    """An object with tensors in places that only its own `to` knows."""

    def __init__(self, x: Tensor) -> None:
        self._store = {"x": x}

    @property
    def x(self) -> Tensor:
        return self._store["x"]

    def to(self, device: torch.device) -> "Movable":
        return Movable(self.x.to(device))


class Listed(list[Tensor]):
    label = 3


class Attributed(OrderedDict[str, Any]):
    """Like the ModelOutput of transformers: its items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Fixed(tuple[Tensor, ...]):
    """A subclass of tuple that is no named tuple."""


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.parts = [{"x": x}]


def attributed(x: Tensor) -> Attributed:
    made = Attributed()
    made["x"] = x
    return made


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "UserDict": (lambda x: Encoding({"x": x, "ids": [1, 2]}, 2), lambda made: made["x"]),
    "dataclass": (lambda x: Sample(x, {"x": [x]}, "a"), lambda made: made.more["x"][0]),
    "dataclass with slots": (lambda x: Slotted(1, Slotted(x)), lambda made: made.of.x),  # type: ignore[arg-type]
    "attrs": (lambda x: Attrs(x, ("a",)), lambda made: made.x),
    "frozen attrs": (FrozenAttrs, lambda made: made.x),
    "object with to": (Movable, lambda made: made.x),
    "subclass of list": (lambda x: Listed([x]), lambda made: made[0]),
    "subclass of dict": (attributed, lambda made: made.x),
    "subclass of tuple": (lambda x: Fixed((x,)), lambda made: made[0]),
    "set": (lambda x: {x}, lambda made: next(iter(made))),
    "packed sequence": (lambda x: pack_sequence([x]), lambda made: made.data),
}


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", HOLDERS)
def test_objects_that_hold_tensors_are_moved(kind: str, nested: bool, device: str) -> None:
    """A moved object keeps its class and everything else in it. The loader's own object stays on the host."""
    make, tensor_of = HOLDERS[kind]
    x = torch.arange(6.0).view(3, 2)
    source = make(x)
    with pytest.warns(ampkit.AmpkitWarning, match="without overlap") if device == "meta" else nullcontext():
        batches = ampkit.prefetch([{"batch": [source]} if nested else source], device)
    (moved,) = batches
    moved = moved["batch"][0] if nested else moved
    assert type(moved) is type(source)
    assert tensor_of(moved).device.type == device
    assert tensor_of(source).device.type == "cpu"
    if device == "cuda":
        assert torch.equal(tensor_of(moved).cpu(), x)
    for name in ("n_sequences", "name", "tags", "label"):
        assert getattr(moved, name, None) == getattr(source, name, None)
    if kind == "dataclass":
        assert moved.image is moved.more["x"][0]  # one tensor, as in the loader's batch
    if kind == "subclass of dict":
        assert moved.x is moved["x"]


@pytest.mark.parametrize("kind", HOLDERS)
def test_objects_on_the_device_are_handed_out_as_they_are(kind: str) -> None:
    """On the CPU nothing is copied, in whatever objects the tensors are."""
    source = HOLDERS[kind][0](torch.ones(3, 2))
    made = next(iter(ampkit.prefetch([source], "cpu")))
    assert HOLDERS[kind][1](made) is HOLDERS[kind][1](source)


@pytest.mark.parametrize("batch", [Opaque(torch.ones(2)), {"a": (1, Opaque(torch.ones(2)))}])
@pytest.mark.filterwarnings("ignore:prefetch. batches are copied to meta")
def test_an_object_whose_tensors_cannot_be_moved_is_refused(batch: Any) -> None:
    """The error names the class, rather than leave its tensors on the host."""
    with pytest.raises(ampkit.AmpkitError, match=r"batch 1 holds a test_prefetch\.Opaque.*no method to\(device\)"):
        list(ampkit.prefetch([torch.ones(1), batch], "meta"))


@pytest.mark.filterwarnings("ignore:prefetch. batches are copied to meta")
def test_objects_without_tensors_pass_through() -> None:
    """A `to` with another meaning is not called. An object that contains itself is an error, not an endless loop."""

    class Date:
        def to(self, zone: str) -> None:
            raise AssertionError("not asked")

    plain = [Date(), Slotted(1), np.ones(2), "text", {"a": {1, 2}}]  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(ampkit.prefetch(plain, "meta"), plain, strict=True) if type(a) is not dict)
    chained = Slotted(torch.ones(1))
    chained.of = chained
    with pytest.raises(ampkit.AmpkitError, match=r"Slotted contains itself"):
        list(ampkit.prefetch([chained], "meta"))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Encoding({"x": torch.ones(2)}, 1), r"batch\[0\] is a test_prefetch\.Encoding.*Write step\(\*\*batch\)"),
        (Sample(torch.ones(2), {}, ""), r"Sample, in which a step does not see.*Write step\(\*\*vars\(batch\)\)"),
        (FrozenAttrs(torch.ones(2)), r"Write step\(\*\*vars\(batch\)\)"),
        (
            Opaque(torch.ones(2)),
            r"test_prefetch\.Opaque, in which a step does not see the tensors. Pass its tensors in",
        ),
        ([Opaque(torch.ones(2))], r"batch\[0\]\[0\] is a test_prefetch\.Opaque.*Pass its tensors in a dict"),
    ],
)
def test_a_step_says_how_to_pass_what_holds_tensors(batch: Any, says: str) -> None:
    """R9: objects compare by identity, so each would be a new layout. An error says what to pass instead."""
    model = torch.nn.Linear(2, 2)
    step = ampkit.graphed_step(
        lambda m, batch: m(torch.ones(2)).sum(), model, torch.optim.SGD(model.parameters(), fused=True), graph="emulate"
    )
    with pytest.raises(ampkit.InputMismatch, match=says):
        step(batch)


def test_a_module_may_be_an_argument() -> None:
    """A module is passed on as it is, because its parameters are not part of the input."""
    model, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    step = ampkit.graphed_step(
        lambda m, other, x: (m(x) - other(x)).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), fused=True),
        graph="emulate",
    )
    for _ in range(5):
        step(teacher, torch.ones(2))
    assert step.replays == 2


@pytest.mark.cuda
def test_memory_of_objects_is_not_given_away() -> None:
    """Tensors in objects are recorded on the stream of the loop, like those of a tree."""
    batches = [Movable(torch.full((1 << 20,), float(i)).pin_memory()) for i in range(8)]
    sums = []
    for batch in ampkit.prefetch(batches, "cuda"):
        torch.cuda._sleep(10_000_000)
        sums.append(batch.x.sum())
    assert [float(total) / (1 << 20) for total in sums] == [float(i) for i in range(8)]


# ---------------------------------------------------------------------------------------------------------- transform


def pixels(n: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randint(256, (4, size, size, 3), dtype=torch.uint8, generator=made), torch.randint(10, (4,)))
        for _ in range(n)
    ]


def decoder(device: str) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return the transform that the docstring of `prefetch` shows."""
    mean, scale = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in ((120.0, 110.0, 100.0), (0.02, 0.03, 0.02)))

    def decode(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        assert images.device.type == device
        assert not torch.is_grad_enabled()
        return (images.permute(0, 3, 1, 2) - mean) * scale, labels

    return decode


@pytest.mark.parametrize("device", DEVICES)
def test_transform_decodes_on_the_device(device: str) -> None:
    """Each batch is decoded once, in order, after its copy and without autograd. The values are those of the host."""
    source = pixels(20)
    decode = decoder("cpu")
    batches = ampkit.prefetch(source, device, transform=decoder(device))
    for _ in range(2):
        seen = list(batches)
        assert len(seen) == len(source)
        for (images, labels), batch in zip(seen, source, strict=True):
            with torch.no_grad():
                expected, _ = decode(batch)
            assert images.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(images.cpu(), expected)
            assert torch.equal(labels.cpu(), batch[1])
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("device", DEVICES)
def test_transform_draws_random_numbers_as_the_loop_would(device: str) -> None:
    """Transform and step draw random numbers in the order that a call at the start of the loop's body would have."""

    def flip(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(2), images), labels

    source = pixels(12)
    drawn = {}
    for by_prefetch in (True, False):
        torch.manual_seed(5)
        drawn[by_prefetch] = []
        for batch in ampkit.prefetch(source, device, transform=flip if by_prefetch else None):
            images, _ = batch if by_prefetch else flip(batch)
            drawn[by_prefetch] += [images.cpu(), torch.rand(3, device=device).cpu()]
    assert all(torch.equal(a, b) for a, b in zip(drawn[True], drawn[False], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [ZeroDivisionError("by a pixel"), StopIteration("here")])
def test_an_error_of_transform_names_it(device: str, error: Exception) -> None:
    """The error names the batch, and its cause is what was raised. Earlier batches came, and a new loop starts anew."""

    def fails_at_1(batch: Tensor) -> Tensor:
        if fails and batch[0] == 1:
            raise error
        return batch + 1

    fails = True
    batches = ampkit.prefetch([torch.full((2,), float(i)) for i in range(3)], device, transform=fails_at_1)
    iterator = iter(batches)
    assert next(iterator)[0] == 1
    with pytest.raises(
        ampkit.AmpkitError, match=rf"prefetch\(transform\): batch 1: {type(error).__name__}: "
    ) as caught:
        next(iterator)
    assert caught.value.__cause__ is error
    assert next(iterator, None) is None, "the loop is over"
    assert torch.is_grad_enabled()
    fails = False
    assert [int(batch[0]) for batch in batches] == [1, 2, 3]


def test_a_transform_that_returns_nothing() -> None:
    """The error says that the transform lacks a return, before the loop unpacks None."""
    with pytest.raises(ampkit.AmpkitError, match=r"prefetch\(transform\): batch 0: it returned None, not a batch"):
        next(iter(ampkit.prefetch([torch.ones(1)], "cpu", transform=lambda batch: None)))


def test_transform_must_be_a_function() -> None:
    """The constructor raises the error."""
    with pytest.raises(ValueError, match=r"prefetch\(transform=3\): expected a function of a batch, or None"):
        ampkit.prefetch([], "cpu", transform=3)  # type: ignore[call-overload]


class Queue:
    """Stands for a CUDA stream, and records the calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Queue") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> "Queue":
        self.log.append(f"event on {self.name}")
        return self

    def synchronize(self) -> None:
        self.log.append("host waits")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a prefetcher for a CUDA device queues on which stream. It needs no CUDA device."""
    log: list[str] = []
    side, consumer = Queue("side", log), Queue("consumer", log)
    current = [consumer]

    @contextmanager
    def stream(entered: Queue) -> Iterator[None]:
        current.append(entered)
        yield
        current.pop()

    def copy(self: Any, tensor: Tensor, **_: Any) -> Tensor:
        log.append(f"copy on {current[-1].name}")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr("ampkit._batches.prefetch._side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ampkit.prefetch, "_copy", copy)
    return log


def test_what_is_queued_in_which_order(queued: list[str]) -> None:
    """The side stream has the copy and then the transform. It does not wait for the step before."""

    def transform(batch: Tensor) -> Tensor:
        assert torch.cuda.current_stream(batch.device).name == "side"  # type: ignore[attr-defined]
        queued.append("transform")
        return batch + 1

    loader = (torch.full((1,), float(i)) for i in range(4))
    for i, batch in enumerate(ampkit.prefetch(loader, "cuda", depth=1, transform=transform)):
        assert batch == i + 1
        queued.append("step")
    one = ["copy on side", "transform", "consumer waits for side", "step", "event on consumer"]
    assert queued == ["side waits for consumer", *one, *one, "host waits", *one, "host waits", *one, "host waits"]


def test_the_step_waits_for_a_transform_that_failed(queued: list[str]) -> None:
    """The step waits, because the transform's kernels may still read constants that the error frees."""

    def fails(batch: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ampkit.AmpkitError, match="ValueError: no"):
        list(ampkit.prefetch([torch.ones(1)], "cuda", transform=fails))
    assert queued[-1] == "consumer waits for side"


@pytest.mark.cuda
def test_transform_runs_while_the_step_does() -> None:
    """Copy and transform end while the step that was launched before still runs."""
    over = []

    def watched(batch: Tensor) -> Tensor:
        decoded = batch.float() / 255
        over.append(torch.cuda.current_stream().record_event())
        return decoded

    source = [torch.full((1 << 20,), i, dtype=torch.uint8).pin_memory() for i in range(3)]
    batches = iter(ampkit.prefetch(source, "cuda", transform=watched))
    next(batches)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    step = torch.cuda.current_stream().record_event()
    batch = next(batches)
    over[1].synchronize()
    assert not step.query()
    assert torch.equal(batch, torch.full_like(batch, 1 / 255))


@pytest.mark.cuda
def test_transformed_batches_survive_a_slow_consumer() -> None:
    """On a busy device, neither a copied batch nor the transform's result is overwritten while it is read."""
    source = [(torch.full((256, 1024), i, dtype=torch.uint8).pin_memory(), i) for i in range(60)]
    busy = torch.randn(2048, 2048, device="cuda")
    sums, kept = [], []

    def both(batch: tuple[Tensor, int]) -> tuple[Tensor, Tensor, int]:
        raw, i = batch
        return raw, raw.float().sqrt().square(), i

    for raw, decoded, i in ampkit.prefetch(source, "cuda", transform=both):
        for _ in range(3):
            busy = busy @ busy.t() / 2048
        sums.append((raw.sum() - 256 * 1024 * i, (decoded - i).abs().max()))
        if i % 3 == 0:
            kept.append((raw, decoded, i))
    assert all(float(a) == 0 and float(b) < 1e-3 for a, b in sums)
    for raw, decoded, i in kept:
        assert torch.equal(raw, torch.full_like(raw, i))
        torch.testing.assert_close(decoded, torch.full_like(decoded, float(i)))


@pytest.mark.cuda
def test_batches_that_lie_on_the_device_are_transformed_when_they_are_there() -> None:
    """The transform runs after the loader's kernels, and the batch's memory is not reused while it reads it."""
    busy = torch.randn(4096, 4096, device="cuda")

    def loader() -> Iterator[Tensor]:
        for i in range(20):
            (busy @ busy).sum()
            yield torch.full((1 << 20,), float(i), device="cuda")
            torch.full((1 << 20,), -1.0, device="cuda")  # would be put in the memory of the batch if that were free

    sums = [batch.mean() for batch in ampkit.prefetch(loader(), "cuda", transform=lambda batch: batch * 2)]
    assert [float(mean) for mean in sums] == [2.0 * i for i in range(20)]


@pytest.mark.cuda
def test_nothing_waits_for_the_device() -> None:
    """Neither the copy of pinned uint8 images nor their decoding waits for the device."""
    source = [(images.pin_memory(), labels.pin_memory()) for images, labels in pixels(10)]
    batches = ampkit.prefetch(source, "cuda", depth=100, transform=decoder("cuda"))
    with no_sync():
        assert len(list(batches)) == 10


@pytest.mark.cuda
def test_epochs_take_no_more_memory() -> None:
    """All prefetchers copy on one stream, so each epoch reuses the memory of the last one."""
    source = [torch.zeros(1 << 22, dtype=torch.uint8).pin_memory()] * 6  # 4 MiB each, 16 decoded

    def epoch() -> int:
        for batch in ampkit.prefetch(source, "cuda", transform=lambda batch: batch.float()):
            batch.add_(1)
        del batch
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    epoch()
    first = epoch()
    assert [epoch() for _ in range(40)][-1] <= first + (64 << 20)


@pytest.mark.cuda
def test_a_captured_step_behind_a_random_transform_has_eager_bits() -> None:
    """Dropout in the graph and augmentation in the transform draw the same numbers as with an eager step."""

    def augment(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        images = images.permute(0, 3, 1, 2).float() / 255
        return images + 0.1 * torch.randn_like(images), labels

    def train(graph: str) -> list[Tensor]:
        model = make_net("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        step = ampkit.graphed_step(
            lambda net, x, y: F.cross_entropy(net(x), y), model, optimizer, policy="bfloat16", graph=graph
        )
        torch.manual_seed(11)
        losses = [step(*batch).loss.cpu() for batch in ampkit.prefetch(source, "cuda", transform=augment)]
        assert step.report().replays > 0 if graph == "auto" else True
        return [*losses, *(param.detach().cpu() for param in model.parameters())]

    source = pixels(12)
    with deterministic():
        graphed, eager = train("auto"), train("off")
    assert all(torch.equal(a, b) for a, b in zip(graphed, eager, strict=True))


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_depth_must_be_positive(depth: int) -> None:
    """A depth of 0 is refused, since such a loop would never start."""
    with pytest.raises(ValueError, match=r"prefetch\(depth="):
        ampkit.prefetch([], "cpu", depth=depth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_says_so() -> None:
    """The error comes at once, and says what to pass."""
    with pytest.raises(ValueError, match=r"no CUDA device is available. Pass 'cpu'"):
        ampkit.prefetch([], "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_survive_a_slow_consumer(pinned: bool) -> None:
    """Later copies never overwrite batches that the user keeps, even if the device is always busy."""
    source = [torch.full((256, 1024), float(i)) for i in range(40)]
    if pinned:
        source = [batch.pin_memory() for batch in source]
    busy = torch.randn(2048, 2048, device="cuda")
    kept = []
    for batch in ampkit.prefetch(source, "cuda"):
        for _ in range(3):
            busy = busy @ busy.t() / 2048
        kept.append(batch)
    for i, batch in enumerate(kept):
        assert torch.equal(batch, torch.full_like(batch, float(i)))


@pytest.mark.cuda
def test_memory_of_waiting_batches_is_bounded() -> None:
    """`depth` bounds how many batches wait on the device if the host is faster."""
    source = [torch.zeros(1 << 20).pin_memory()] * 200  # 4 MiB each
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in ampkit.prefetch(source, "cuda"):
        busy.matmul(busy)
        batch.add_(1)
    assert torch.cuda.max_memory_allocated() - before < (64 + 6 * 4) << 20  # the product, and a few batches
