"""What counts as the same input; static buffers; the paths that messages use."""

import operator
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from harness import bits

from ampkit import InputMismatch
from ampkit._capture.keys import inputs as _inputs
from ampkit._capture.keys.inputs import BatchReader, Spec, StaticInputs, paths, read_batch
from ampkit._torch.tensors.tree import tree_flatten

CPU = torch.device("cpu")


class OfItsOwn(torch.Tensor):
    """A loss may ask for it, as for an image of torchvision's."""


class Wrapper(torch.Tensor):
    """A tensor subclass that wraps another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def spec_of(*args: Any, **kwargs: Any) -> Spec:
    return read_batch(args, kwargs, CPU)[0]


def test_equal_layouts_have_equal_specs() -> None:
    """Equal layouts have equal specs, whatever the values. A spec is hashable."""
    assert spec_of(torch.zeros(2, 3), scale=2) == spec_of(torch.ones(2, 3), scale=2)
    assert hash(spec_of(torch.zeros(2, 3), scale=2)) == hash(spec_of(torch.ones(2, 3), scale=2))
    one, other = (spec_of(scale=(float("nan"), complex("nan"))) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (((torch.zeros(4, 3),), {}), ((torch.zeros(2, 3),), {})),
        (((torch.zeros(2),), {}), ((torch.zeros(2).half(),), {})),
        (((torch.zeros(2, 3),), {}), ((torch.zeros(3, 2).t(),), {})),
        ((({"a": [torch.zeros(2)]},), {}), (({"a": [torch.zeros(1)]},), {})),
        (((), {"k": 1}), ((), {"k": 2})),
        (((), {"k": 1}), ((), {"k": True})),
        (((), {"k": 0.0}), ((), {"k": -0.0})),
        (((torch.zeros(2),), {}), ((torch.zeros(2), torch.zeros(2)), {})),
    ],
    ids=["shape", "dtype", "strides", "nested", "constant", "type of a constant", "sign of a zero", "tree"],
)
def test_what_makes_another_input(old: Any, new: Any) -> None:
    """Shape, dtype, strides, constants and tree are all part of the key."""
    assert spec_of(*old[0], **old[1]) != spec_of(*new[0], **new[1])


def test_a_leaf_is_named_by_its_path() -> None:
    """Messages name a leaf as the user wrote it, whether it came by position or by name."""
    spec = spec_of(torch.zeros(2), {"a": [torch.zeros(2), 3]}, mask=torch.zeros(2))
    assert paths(spec.tree) == ["batch[0]", "batch[1]['a'][0]", "batch[1]['a'][1]", "batch['mask']"]


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (torch.zeros(2, device="meta"), r"batch\['x'\] is on meta, but the model is on cpu. Move it with .to\('cpu'\)"),
        (torch.zeros(2, requires_grad=True), r"batch\['x'\] requires grad.*Pass batch\['x'\].detach\(\)"),
        (torch.eye(2).to_sparse(), r"batch\['x'\] has layout torch.sparse_coo.*to_dense"),
        (
            torch.zeros(2).as_subclass(OfItsOwn),
            r"batch\['x'\] is a .*OfItsOwn; a step takes plain tensors.*as_subclass\(torch.Tensor\)",
        ),
        (
            torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
            r"batch\['x'\] is a nested tensor.*to_padded_tensor\(0\)",
        ),
        (
            Wrapper(torch.zeros(2)),
            r"batch\['x'\] is a .*Wrapper; a step takes plain tensors.*Pass a plain torch.Tensor.",
        ),
        ({1, 2}, r"batch\['x'\] is a set, which is neither a tensor nor hashable.*torch.as_tensor"),
    ],
)
def test_unusable_leaves_are_refused(leaf: Any, says: str) -> None:
    """A leaf that no graph can take is an error whose message has the leaf's path and the remedy."""
    with pytest.raises(InputMismatch, match=says):
        spec_of(torch.zeros(1), x=leaf)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.tensor(5),
        torch.zeros(0, 3),
    ],
)
def test_static_buffers_hold_any_layout(tensor: torch.Tensor) -> None:
    """A buffer equals what is copied into it, keeps strides that can be written to, and never aliases the caller."""
    spec, leaves = read_batch((tensor,), {}, CPU)
    inputs = StaticInputs(spec, leaves)
    inputs.copy_(leaves)
    (buffer,) = inputs.args
    assert torch.equal(buffer, tensor)
    assert buffer.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or tensor.numel() == 0
    if 0 not in tensor.stride():
        assert buffer.stride() == tensor.stride()


def test_static_inputs_keep_tree_and_constants() -> None:
    """The static batch is the tree that the user passed, constants included; bytes count tensors only."""
    spec, leaves = read_batch(({"a": torch.zeros(4), "n": 3},), {"flag": True}, CPU)
    inputs = StaticInputs(spec, leaves)
    assert inputs.args[0]["n"] == 3
    assert inputs.kwargs == {"flag": True}
    assert inputs.nbytes == 16


class Pair(NamedTuple):
    left: Any
    right: Any


T = torch.zeros(2)
BATCHES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "tensors": ((T, T), {}),
    "by name": ((T,), {"mask": T, "scale": 2.0}),
    "nothing": ((), {}),
    "nested": (([T, (T, {"a": T, "b": [None, "x"]})],), {"more": {"c": ()}}),
    "keys in another order": (({"b": T, "a": T},), {}),
    "numbers as keys": (({1: T, "1": T},), {}),
    "named tuple": ((Pair(T, [T]),), {}),
    "ordered": ((OrderedDict(a=T, b=T),), {}),
    "dtype and device": ((T, torch.float16, CPU), {}),
    "parameter": ((torch.nn.Parameter(T, requires_grad=False),), {}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_leaves_and_tree_are_those_of_torch(name: str) -> None:
    """All containers are flattened as torch does it: the same leaves, order and tree, also if the tree was kept."""
    args, kwargs = BATCHES[name]
    expected, tree = tree_flatten((args, kwargs))
    for _ in range(2):  # made, then looked up
        spec, leaves = read_batch(args, kwargs, CPU)
        assert spec.tree == tree
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
    others = [read_batch(*batch, CPU)[0] for other, batch in BATCHES.items() if other != name]
    assert spec not in others


def test_trees_that_vary_do_not_pile_up() -> None:
    """A dict with other keys in each batch: its tree is right each time, and memory is bounded."""
    for i in range(600):
        spec, leaves = read_batch(({f"key {i}": T},), {}, CPU)
        assert spec.tree == tree_flatten((({f"key {i}": T},), {}))[1]
        assert leaves[0] is T
    assert len(_inputs._trees) <= _inputs._MAX_TREES


def batches_like(x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return batches with the two tensors in several containers."""
    return {
        "flat": ((x, y), {}),
        "list": (([x, y],), {}),
        "dict": (({"x": x, "y": y},), {}),
        "keywords": ((x,), {"y": y}),
    }


@pytest.mark.parametrize("kind", ["flat", "list", "dict", "keywords"])
def test_a_reader_knows_the_layout_of_the_batch_before(kind: str) -> None:
    """From the third batch of a layout on, the very same spec comes back, with the leaves of the new batch."""
    reader, specs = BatchReader(CPU), []
    for step in range(5):
        x, y = torch.full((2, 3), float(step)), torch.tensor([1, 2])
        args, kwargs = batches_like(x, y)[kind]
        spec, leaves = reader.spec_and_leaves(args, kwargs)
        assert spec == read_batch(args, kwargs, CPU)[0]
        assert [leaf is given for leaf, given in zip(leaves, (x, y), strict=True)] == [True, True]
        specs.append(spec)
    assert all(spec is specs[1] for spec in specs[2:])


def changed_batches() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    x, y = torch.zeros(2, 3), torch.tensor([1, 2])
    return {
        "dtype": ((x.double(), y), {}),
        "shape": ((torch.zeros(2, 4), y), {}),
        "strides": ((torch.zeros(3, 2).t(), y), {}),
        "containers": (([x, y],), {}),
        "one argument more": ((x, y, x.clone()), {}),
        "a keyword": ((x,), {"y": y}),
        "a constant": ((x, 3), {}),
        "none": ((x, None), {}),
        "no batch": ((), {}),
        "one tensor twice": ((x, x), {}),
    }


@pytest.mark.parametrize("change", list(changed_batches()))
def test_a_reader_sees_every_change_of_a_layout(change: str) -> None:
    """What the quick way reads is what the long way reads, also when the first layout comes back."""
    reader, usual = BatchReader(CPU), ((torch.zeros(2, 3), torch.tensor([1, 2])), {})
    other = changed_batches()[change]
    for args, kwargs in (usual, usual, usual, other, usual, other, other, other, usual):
        spec, leaves = reader.spec_and_leaves(args, kwargs)
        expected, found = read_batch(args, kwargs, CPU)
        assert spec == expected
        assert all(map(operator.is_, leaves, found))


def test_a_reader_refuses_what_cannot_be_an_input() -> None:
    """The quick way accepts no tensor that the long way refuses; the next batch is read as before."""
    reader, y = BatchReader(CPU), torch.tensor([1, 2])
    for _ in range(3):
        reader.spec_and_leaves((torch.zeros(2, 3), y), {})
    for wrong in (
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).as_subclass(OfItsOwn),
        torch.zeros(2, 3).to_sparse(),
    ):
        with pytest.raises(InputMismatch):
            reader.spec_and_leaves((wrong, y), {})
        assert reader.spec_and_leaves((torch.zeros(2, 3), y), {})[0] == spec_of(torch.zeros(2, 3), y)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.bool, torch.uint8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_several_tensors_of_one_dtype(device: str, dtype: torch.dtype) -> None:
    """Batches of equal dtypes are copied bit by bit: NaNs with a payload, strided tensors and empty ones too."""
    made = torch.Generator().manual_seed(0)
    size = dtype.itemsize

    def leaf(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * size
        drawn = torch.randint(2 if dtype is torch.bool else 256, (count,), generator=made, dtype=torch.uint8)
        return drawn.view(dtype).reshape(shape).to(device)

    def batch() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (leaf(3, 4), leaf(5, 2).t(), leaf(0, 2)), {"third": leaf(1)[0], "number": 3}

    spec, leaves = read_batch(*batch(), torch.device(device, 0) if device == "cuda" else CPU)
    inputs = StaticInputs(spec, leaves)
    for _ in range(2):
        args, kwargs = batch()
        inputs.copy_(tree_flatten((args, kwargs))[0])
        for found, given in zip((*inputs.args, inputs.kwargs["third"]), (*args, kwargs["third"]), strict=True):
            assert found.stride() == given.stride()
            assert torch.equal(bits(found), bits(given))
