"""prefetch: the same batches, on the device, without waiting."""

from collections.abc import Iterator

import pytest
import torch
from harness import DEVICES
from torch import Tensor

import ampkit

Batch = dict[str, object]


class Loader:
    """Five batches with tensors in a tree and a string beside them."""

    def __init__(self) -> None:
        self.started = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Batch]:
        self.started += 1
        return ({"x": [torch.full((3, 2), float(i))], "name": f"batch {i}"} for i in range(5))


@pytest.mark.parametrize("device", DEVICES)
def test_yields_the_loaders_batches_on_the_device(device: str) -> None:
    """Tensors are moved within their tree, other leaves pass through, len is the loader's, each epoch starts anew."""
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
    """What the loader raises is not swallowed, and batches before it were delivered."""

    def broken() -> Iterator[Tensor]:
        yield torch.ones(1)
        raise OSError("disk")

    batches = iter(ampkit.prefetch(broken(), "cpu"))
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk"):
        next(batches)


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_depth_must_be_positive(depth: int) -> None:
    """A depth of 0 would never start."""
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
    """Batches kept by the user are never overwritten by later copies, with the device busy all the time."""
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
    """A host that outruns the device does not pile up batches there: depth bounds them."""
    source = [torch.zeros(1 << 20).pin_memory()] * 200  # 4 MiB each
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in ampkit.prefetch(source, "cuda"):
        busy.matmul(busy)
        batch.add_(1)
    assert torch.cuda.max_memory_allocated() - before < (64 + 6 * 4) << 20  # the product, and a handful of batches
