"""Padding to buckets: values, masks, layouts and trees; the padding does not change a masked loss."""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness import DEVICES, no_sync
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit import Buckets, InputMismatch


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


# ------------------------------------------------------------------------------------------------------------- value


def test_sizes_are_sorted_and_unique() -> None:
    """Sizes in any order give equal buckets, which can be hashed, pickled and printed."""
    buckets = Buckets(batch=[64, 16, 32, 16], length={8, 4}, pad={"batch[1]": -100, "batch[0]": 1})  # type: ignore[arg-type]
    assert buckets == Buckets((16, 32, 64), (4, 8), (("batch[0]", 1), ("batch[1]", -100)))
    assert hash(buckets) == hash(pickle.loads(pickle.dumps(buckets)))
    shown = "Buckets(batch=(16, 32, 64), length=(4, 8), pad=(('batch[0]', 1), ('batch[1]', -100)), mask='mask')"
    assert str(buckets) == shown
    assert eval(shown) == buckets
    with pytest.raises(AttributeError, match="cannot assign"):
        buckets.batch = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"batch": 32}, r"Buckets\(batch=32\): expected sizes.*Pass batch=\(32,\)"),
        ({"batch": ()}, r"Buckets\(batch=\(\)\).*Pass batch=\(16, 32, 64\)"),
        ({"batch": (0, 4)}, "ints of at least 1"),
        ({"batch": (4.0,)}, "ints of at least 1"),
        ({"batch": (True,)}, "ints of at least 1"),
        ({"batch": "48"}, "ints of at least 1"),
        ({"batch": {4: 1}}, "ints of at least 1"),
        ({"batch": (4,), "length": 7}, r"Pass length=\(7,\)"),
        ({"batch": (4,), "length": (-7,)}, r"Buckets\(length=\(-7,\)\)"),
        ({"batch": (4,), "pad": None}, r"Buckets\(pad=None\): expected a number, or numbers by path"),
        ({"batch": (4,), "pad": "0"}, "expected a number"),
        ({"batch": (4,), "pad": 1j}, "expected a number"),
        ({"batch": (4,), "pad": {1: 0}}, r"such as \{\"batch\['labels'\]\": -100\}"),
        ({"batch": (4,), "pad": {"batch[0]": None}}, "expected a number"),
        ({"batch": (4,), "mask": "no name"}, "expected the name of a keyword argument"),
        ({"batch": (4,), "mask": "lambda"}, "expected the name of a keyword argument"),
        ({"batch": (4,), "mask": None}, "expected the name of a keyword argument"),
    ],
)
def test_what_cannot_work_is_refused(kwargs: dict[str, Any], says: str) -> None:
    """The constructor raises the error, which says what to pass."""
    with pytest.raises(ValueError, match=says):
        Buckets(**kwargs)


# ----------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "bucket"), [(0, 4), (1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_batch_is_padded_to_the_smallest_bucket(device: str, size: int, bucket: int) -> None:
    """Zeros follow the samples, and the mask is False there. A batch larger than all buckets is not padded."""
    images, labels = numbers(size, 2, 3).to(device), numbers(size, dtype=torch.int64).to(device)
    (padded, classes), kwargs = Buckets((8, 4)).pad_batch((images, labels), {})
    assert padded.shape == (bucket, 2, 3)
    assert classes.shape == (bucket,)
    assert torch.equal(padded[:size], images)
    assert torch.equal(classes[:size], labels)
    assert not padded[size:].any()
    assert not classes[size:].any()
    assert kwargs.keys() == {"mask"}
    assert kwargs["mask"].device == images.device
    assert kwargs["mask"].dtype is torch.bool
    assert kwargs["mask"].tolist() == [True] * size + [False] * (bucket - size)


@pytest.mark.parametrize(
    ("size", "length", "padded"),
    [(3, 5, (4, 6)), (4, 5, (4, 6)), (3, 6, (4, 6)), (4, 6, (4, 6)), (1, 1, (4, 3)), (5, 2, (5, 2)), (3, 7, (3, 7))],
)
def test_two_dimensions(size: int, length: int, padded: tuple[int, int]) -> None:
    """Batch and length are padded together. If either is too large, neither is padded."""
    tokens, weights, kinds = numbers(size, length, dtype=torch.int32), numbers(size, length, 2), numbers(size)
    args, kwargs = Buckets((4,), length=(3, 6), pad=-1).pad_batch((kinds, tokens, weights), {})
    for before, after in zip((kinds, tokens, weights), args, strict=True):
        shape = (padded[:1] if before.dim() == 1 else padded) + before.shape[2:]
        expected = torch.full(shape, -1, dtype=before.dtype)
        expected[tuple(map(slice, before.shape))] = before
        assert torch.equal(after, expected)
        assert after.dtype is before.dtype
    mask = torch.zeros(padded, dtype=torch.bool)
    mask[:size, :length] = True
    assert torch.equal(kwargs["mask"], mask)


def test_a_tree_keeps_its_shape_and_what_is_not_per_sample() -> None:
    """Constants, numbers and tensors of other sizes stay as they are. Dimension 1 is padded only with `length`."""
    other, scale, constant = numbers(7, 3), torch.tensor(2.0), object()
    batch = {"x": [numbers(3, 3), scale], "n": 3, "none": None}
    args, kwargs = Buckets((5,), mask="real").pad_batch((batch, (other, constant)), {"y": numbers(3)})
    assert args[0].keys() == batch.keys()
    assert args[0]["x"][0].shape == (5, 3)
    assert args[0]["x"][1] is scale
    assert (args[0]["n"], args[0]["none"]) == (3, None)
    assert args[1][0] is other
    assert args[1][1] is constant
    assert kwargs["y"].shape == (5,)
    assert kwargs["real"].tolist() == [True] * 3 + [False] * 2
    assert batch["x"][0].shape == (3, 3), "the caller's batch was changed"  # type: ignore[index]


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, True),
        (torch.bool, 1.0),
        (torch.uint8, 255),
        (torch.int64, -100),
        (torch.int16, 3.0),
        (torch.float16, -65504),
        (torch.float16, float("-inf")),
        (torch.bfloat16, float("nan")),
        (torch.float64, 0.1),
        (torch.complex64, 2),
    ],
)
def test_fill_values(dtype: torch.dtype, fill: float) -> None:
    """The padding is the given number in the tensor's dtype, rounded as torch rounds it."""
    args, _ = Buckets((4,), pad=fill).pad_batch((torch.ones(3, dtype=dtype),), {})
    expected = torch.tensor([fill], dtype=dtype)
    torch.testing.assert_close(args[0][3:], expected, rtol=0, atol=0, equal_nan=True)


def test_fill_values_by_path() -> None:
    """Each tensor is padded with the number for its path, and others with 0."""
    pad = {"batch[1]": -100, "batch['x']['keep']": 1}
    kwargs: Mapping[str, Any] = {"x": {"keep": torch.zeros(2, dtype=torch.bool), "w": torch.ones(2)}}
    buckets = Buckets((3,), pad=pad)
    for _ in range(2):  # the second time, the cache has the numbers
        (images, labels), padded = buckets.pad_batch((torch.ones(2, 1), torch.ones(2).long()), dict(kwargs))
        assert images.tolist() == [[1], [1], [0]]
        assert labels.tolist() == [1, 1, -100]
        assert padded["x"]["keep"].tolist() == [False, False, True]
        assert padded["x"]["w"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "fill", "says"),
    [
        (torch.int64, 0.5, r"batch\['y'\] is int64, which has no 0.5 to pad with.*pad=\{\"batch\['y'\]\": ...\}"),
        (torch.int64, float("nan"), "int64, which has no nan"),
        (torch.int32, float("inf"), "int32, which has no inf"),
        (torch.uint8, -1, "uint8, which has no -1"),
        (torch.int8, 128, "int8, which has no 128"),
        (torch.bool, -100, "bool, which has no -100"),
        (torch.float16, 1e6, "float16, which has no 1000000.0"),
        (torch.float32, 10**400, "float32, which has no 1000"),
    ],
)
def test_a_number_that_the_dtype_does_not_have(size: int, dtype: torch.dtype, fill: float, says: str) -> None:
    """The error comes with the first batch, though that needs no padding."""
    with pytest.raises(InputMismatch, match=says):
        Buckets((4,), pad=fill).pad_batch((), {"y": torch.ones(size).to(dtype)})


@pytest.mark.parametrize(
    ("buckets", "args", "kwargs", "says"),
    [
        (Buckets((4,)), (), {}, "has no tensor of 1 or more dimensions to pad. Pass one, or no buckets"),
        (Buckets((4,)), (torch.tensor(1.0), 3), {}, "has no tensor of 1 or more dimensions"),
        (Buckets((4,), length=(4,)), (torch.ones(3),), {}, "has no tensor of 2 or more.*or length=None"),
        (Buckets((4,)), (torch.ones(3),), {"mask": torch.ones(3)}, r"batch\['mask'\] is there already.*mask='real'"),
        (
            Buckets((4,), pad={"batch['y']": 1}),
            (torch.ones(3),),
            {"x": torch.ones(3)},
            r"has no batch\['y'\]. Name one of batch\[0\], batch\['x'\]",
        ),
    ],
)
def test_a_batch_that_does_not_fit(buckets: Buckets, args: Any, kwargs: Any, says: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(InputMismatch, match=says):
        buckets.pad_batch(args, kwargs)


# ----------------------------------------------------------------------------------------------------------- layouts


LAYOUTS = {
    "contiguous": lambda size: numbers(size, 3, 4, 5),
    "channels_last": lambda size: numbers(size, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last, one pixel": lambda size: numbers(size, 3, 1, 1).to(memory_format=torch.channels_last),
    "one channel": lambda size: numbers(size, 1, 4, 5),
    "time first": lambda size: numbers(6, size, 5).transpose(0, 1),
    "with gaps": lambda size: numbers(size, 7)[:, :-1],
    "expanded over samples": lambda size: numbers(1, 7).expand(size, 7),
    "expanded within samples": lambda size: numbers(size, 1).expand(size, 7),
    "a column": lambda size: numbers(size, 7)[:, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_batch_of_a_bucket_has_one_layout(layout: str) -> None:
    """Batches of one bucket have one layout without gaps, and so one graph: padded, full, or of one sample."""
    batches = [Buckets((4,)).pad_batch((LAYOUTS[layout](size),), {}) for size in (1, 2, 3, 4)]
    function = ampkit.graphed(modules=(), graph="emulate")(lambda x, mask: x.sum() + mask.sum())
    for args, kwargs in batches:
        function(*args, **kwargs)
    assert function.captures == 1
    for size, ((padded,), _) in enumerate(batches, 1):
        assert torch.equal(padded[:size], LAYOUTS[layout](size))
        assert padded.untyped_storage().nbytes() == padded.numel() * 4


@pytest.mark.parametrize("size", [3, 4])
def test_the_order_of_dimensions_in_memory_is_kept(size: int) -> None:
    """channels_last stays channels_last, and a transposed sequence stays transposed."""
    (images,), _ = Buckets((4,)).pad_batch((LAYOUTS["channels_last"](size),), {})
    assert images.is_contiguous(memory_format=torch.channels_last)
    (sequence,), _ = Buckets((4,), length=(8,)).pad_batch((LAYOUTS["time first"](size),), {})
    assert sequence.shape == (4, 8, 5)
    assert sequence.stride() == (5, 20, 1)


def test_a_loss_function_that_takes_no_mask_is_refused() -> None:
    """A loss_fn that could not be called with the mask is an error that says what to write, before the first step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def make(loss_fn: Any, mask: str = "mask") -> None:
        buckets = Buckets((4,), mask=mask)
        ampkit.graphed_step(loss_fn, model, optimizer, graph="off", buckets=buckets).close()

    with pytest.raises(ValueError, match=r"no argument 'mask'.*Write loss_fn\(model, \.\.\., \*, mask\)"):
        make(lambda model, x: model(x).sum())
    with pytest.raises(ValueError, match="no argument 'real'"):
        make(lambda model, x, mask: model(x).sum(), mask="real")
    make(lambda model, x, mask: model(x).sum())
    make(lambda model, x, *, real: model(x).sum(), mask="real")
    make(lambda model, *x, **more: model(*x).sum())


def test_a_tensor_that_fits_is_not_copied() -> None:
    """A tensor that fits is not copied. A padded tensor shares no memory with the caller's."""
    whole, part = numbers(4, 3), numbers(4, 3)[:3]
    assert Buckets((4,)).pad_batch((whole,), {})[0][0] is whole
    (padded,), _ = Buckets((4,)).pad_batch((part,), {})
    part.zero_()
    assert padded[:3].all()


@pytest.mark.parametrize(
    ("leaf", "says"),
    [(torch.ones(3, requires_grad=True), "requires grad"), (torch.eye(3).to_sparse(), "has layout torch.sparse_coo")],
)
def test_the_step_still_refuses_what_it_cannot_take(leaf: Tensor, says: str) -> None:
    """A tensor that no step takes is refused, padded or not."""
    function = ampkit.graphed(modules=(), graph="emulate")(lambda x, mask: x.sum())

    def call() -> None:
        args, kwargs = Buckets((4,)).pad_batch((leaf,), {})
        function(*args, **kwargs)

    with pytest.raises(InputMismatch, match=says):
        call()


# --------------------------------------------------------------------------------------------------------- exactness


class Tagger(nn.Module):
    """Embedding, attention over the sequence and one class per token, without statistics over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        x = self.embedding(tokens)
        # The first token stays visible in samples that are padding, whose attention would otherwise be nan.
        hidden = ~real
        hidden[:, 0] = False
        return self.head(self.norm(x + self.attention(x, x, x, key_padding_mask=hidden)[0]))


def tagger_loss(model: nn.Module, tokens: Tensor, tags: Tensor, *, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(model(tokens, mask).transpose(1, 2), tags, reduction="none")
    return (losses * mask).sum() / mask.sum()


def image_loss(model: nn.Module, images: Tensor, labels: Tensor, *, mask: Tensor) -> Tensor:
    return (F.cross_entropy(model(images), labels, reduction="none") * mask).sum() / mask.sum()


def make_tagger() -> tuple[nn.Module, Any, tuple[Tensor, ...], Buckets]:
    model = Tagger()
    batch = torch.randint(11, (3, 6)), torch.randint(5, (3, 6))
    return model, tagger_loss, batch, Buckets((8,), length=(8,), pad={"batch[1]": -100})


def make_classifier() -> tuple[nn.Module, Any, tuple[Tensor, ...], Buckets]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    batch = torch.randn(3, 3, 6, 6, dtype=torch.float64), torch.randint(5, (3,))
    return model, image_loss, batch, Buckets((8,))


@pytest.mark.parametrize("make", [make_tagger, make_classifier])
@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_loss_does_not_see_the_padding(device: str, make: Any) -> None:
    """For a model without batch statistics, padding changes neither the loss nor the gradients."""
    torch.manual_seed(2)
    model, loss_fn, batch, buckets = make()
    model = model.double().to(device)
    batch = tuple(tensor.to(device) for tensor in batch)
    params = list(model.parameters())
    whole = torch.ones(batch[1].shape, dtype=torch.bool, device=device)
    loss = loss_fn(model, *batch, mask=whole)
    args, kwargs = buckets.pad_batch(batch, {})
    padded = loss_fn(model, *args, **kwargs)
    assert args[0].shape != batch[0].shape
    # Sums over more elements in another order; float64 rounds at 1e-16, and the largest gradient is about 1.
    torch.testing.assert_close(padded, loss, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(loss, params)
    torch.testing.assert_close(torch.autograd.grad(padded, params), wanted, rtol=1e-12, atol=1e-12)
    unmasked = loss_fn(model, *args, **{"mask": torch.ones_like(kwargs["mask"])})
    assert not torch.allclose(unmasked, loss), "the padding made no difference, so the mask was not tested"


@pytest.mark.cuda
@pytest.mark.parametrize("size", [3, 4, 5])
def test_no_sync(size: int) -> None:
    """Padding, masks and fills do not wait for the device."""
    buckets = Buckets((4,), length=(4, 8), pad={"batch[1]": -100, "batch['keep']": 1})
    args = numbers(size, 6, 2).cuda(), numbers(size, 6, dtype=torch.int64).cuda()
    keep = torch.zeros(size, 6, dtype=torch.bool, device="cuda")
    with no_sync():
        padded, kwargs = buckets.pad_batch(args, {"keep": keep})
    assert int(kwargs["mask"].sum()) == size * 6
    assert int((padded[1] == -100).sum()) == (32 - size * 6 if size <= 4 else 0)
