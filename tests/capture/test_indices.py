"""Constants of the host that operations get: indices, and what is written there. The meta device stands for CUDA."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit._capture.host.host_tensors import HostTensors
from ampkit._capture.host.uploads import Provenance, Uploads
from ampkit._capture.preflight.preflight import Finding, Preflight
from ampkit._torch.tensors.modes import show_copies_of_numbers
from ampkit._undo import Undo

KEPT = torch.tensor([2, 0])
LARGE = torch.zeros(100_000, dtype=torch.int64)


def set_to(x: Tensor, index: Any, value: Any) -> Tensor:
    y = x.clone()
    y[index] = value
    return y


# `_to_copy` is what a dispatch mode sees of a list, which torch copies to the meta device in another way.
CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "kept": lambda x: x[KEPT],
    "made": lambda x: x[:, torch.arange(4)[1:3]],
    "two": lambda x: x[torch.tensor([0, 2]), KEPT],
    "with numbers of 32 bits": lambda x: x[torch.tensor([0, 2], dtype=torch.int32)],
    "set": lambda x: set_to(x, KEPT, 0),
    "set to a number on the host": lambda x: set_to(x, KEPT, torch.tensor(2.0)),
    "index_put": lambda x: x.index_put((KEPT,), x[:2], accumulate=True),
    "copy": lambda x: torch.ops.aten._to_copy(torch.tensor([0.5, 1.5]), device=x.device) * x[:, :2],
}
NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x[torch.randint(3, (2,))],
    "of random numbers": lambda x: x[torch.rand(3).argsort()[:2]],
    "large": lambda x: x[:, LARGE],
    "a mask": lambda x: set_to(x, torch.tensor([True, False, True]), x[:1]),
    "copy of random numbers": lambda x: torch.ops.aten._to_copy(torch.rand(2), device=x.device) * x[:, :2],
}


class Seen(TorchDispatchMode):
    """Notes the device of each index, and of each number that is written there."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index" in str(op):
            self.devices += [each.device.type for each in (*args[1], *args[2:3]) if each is not None]
        elif op is torch.ops.aten._to_copy.default:
            self.devices.append(args[0].device.type)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", Tensor.clone)  # of which there is none without a GPU
        yield Uploads(torch.device("meta"), HostTensors())


def x_on_meta() -> Tensor:
    return torch.empty(3, 4, device="meta", requires_grad=True)


def looked(uploads: Uploads, use: Callable[[Tensor], Tensor]) -> tuple[list[Finding], Provenance]:
    """Do forward and backward as the call under the preflight. Return what it finds, and what of constants was used."""
    x, provenance = x_on_meta(), Provenance()
    with Preflight(x.device, observers=[provenance], uploads=uploads) as preflight, uploads.learning(provenance):
        use(x).sum().backward()
    return preflight.findings, provenance


def devices(uploads: Uploads, use: Callable[[Tensor], Tensor], **how: bool) -> set[str]:
    """Do the same as the rehearsal or the capture. Return on which devices operations find their indices."""
    x = x_on_meta()
    with Seen() as seen, uploads.in_place(**how):
        use(x).sum().backward()
    return set(seen.devices)


@pytest.mark.parametrize("use", CONSTANT.values(), ids=CONSTANT)
def test_an_index_of_constants_is_uploaded(use: Callable[[Tensor], Tensor], uploads: Uploads) -> None:
    """D1: it is no finding; in the rehearsal and the capture operations get the constant, in backward too."""
    findings, provenance = looked(uploads, use)
    assert findings == []
    assert provenance.in_operations
    assert devices(uploads, use, in_operations=True) == {"meta"}
    assert devices(uploads, use, in_operations=True, captures=True) == {"meta"}


@pytest.mark.parametrize("use", NAMED.values(), ids=NAMED)
def test_an_index_that_may_vary_is_named(use: Callable[[Tensor], Tensor], uploads: Uploads) -> None:
    """D1: random and large indices and masks are copied by a line that is named."""
    findings, provenance = looked(uploads, use)
    assert findings
    assert not provenance.in_operations
    assert "cpu" in devices(uploads, use, in_operations=True)


def test_no_mode_without_such_an_index(uploads: Uploads) -> None:
    """D1: a step without indices on the host is rehearsed and captured without a dispatch mode."""
    _, provenance = looked(uploads, lambda x: torch.tensor(0.5, device=x.device) * KEPT[:1].to(x.device) * x)
    assert not provenance.in_operations
    looked(uploads, CONSTANT["kept"])
    assert "cpu" in devices(uploads, CONSTANT["kept"], in_operations=False)


def test_another_index_in_the_capture_is_an_error(uploads: Uploads) -> None:
    """D1: an index with other numbers than in the calls before is an error that names the line."""

    def other(x: Tensor) -> Tensor:
        return x[torch.tensor([1, 1])]

    looked(uploads, CONSTANT["kept"])
    assert "cpu" in devices(uploads, other, in_operations=True)
    with pytest.raises(ampkit.CaptureError, match=r"test_indices.py:\d+: .*copies numbers"):
        devices(uploads, other, in_operations=True, captures=True)


def test_a_changed_index_is_compared(uploads: Uploads) -> None:
    """D1: a tensor that is kept from call to call is compared with what it was."""
    kept = torch.tensor([0, 1])
    looked(uploads, lambda x: x[kept])
    before = uploads._host_tensors.values()
    kept[0] = 2
    assert any("x[kept]" in line for line in before.changed(uploads._host_tensors.values()))


def test_compiled_code_is_made_as_without() -> None:
    """D1: while torch compiles, it puts numbers on the device as ever, and in other threads and later, too."""
    shows = torch._C._only_lift_cpu_tensors
    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(shows())
        return graph

    compiled = torch.compile(lambda x: x[:, [-2]] + 1, backend=backend)
    with Undo() as undo:
        show_copies_of_numbers(undo)
        seen.append(shows())
        compiled(torch.ones(3, 4))
        seen.append(shows())
    assert (seen, shows()) == ([True, False, True], False)
