"""Operations that are given the numbers which they read otherwise: the same bits and the same layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit._torch.tensors.host_counts import counts_of, with_counts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def scattered(x: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of what `masked_scatter` takes from a tensor of this shape."""
    source = torch.zeros(shape, device=x.device, requires_grad=True)
    return torch.autograd.grad(torch.zeros_like(x).masked_scatter(mask, source), source, x)[0]


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "rows": lambda x, rows, all_of_it: x[rows],
    "columns": lambda x, rows, all_of_it: x[:, all_of_it[0], None],
    "all": lambda x, rows, all_of_it: x[all_of_it],
    "rows and places": lambda x, rows, all_of_it: x[:, None][
        torch.arange(2, device=x.device)[:, None], :, all_of_it[0]
    ],
    "nothing": lambda x, rows, all_of_it: x[x > 9],
    "put": lambda x, rows, all_of_it: x.index_put_((rows,), x[rows] * 2),
    "add": lambda x, rows, all_of_it: x.index_put((rows,), x[rows], accumulate=True),
    "selected": lambda x, rows, all_of_it: x.masked_select(rows[:, None]),
    "selected of one row": lambda x, rows, all_of_it: x[0].masked_select(all_of_it),
    "selected of a number": lambda x, rows, all_of_it: x[0, 0].masked_select(rows[0]),
    "selected of nothing": lambda x, rows, all_of_it: x[:0].masked_select(all_of_it[0]),
    "scattered": lambda x, rows, all_of_it: scattered(x, all_of_it, x.shape),
    "scattered of rows": lambda x, rows, all_of_it: scattered(x, rows[:, None], (7, 5)),
    "scattered of nothing": lambda x, rows, all_of_it: scattered(x, x > 9, (2, 3)),
    "scattered to nothing": lambda x, rows, all_of_it: scattered(x, x > 9, (0, 3)),
    "places": lambda x, rows, all_of_it: all_of_it.nonzero(),
    "places of a number": lambda x, rows, all_of_it: rows[0].nonzero(),
    "where": lambda x, rows, all_of_it: torch.where(all_of_it)[1],
    "repeats": lambda x, rows, all_of_it: x.repeat_interleave(rows.long() * 2, dim=0),
    "size": lambda x, rows, all_of_it: torch.zeros(rows.sum(), device=x.device),
}


class _Given(TorchDispatchMode):
    """Compares each operation that reads numbers with the one that is given them."""

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = counts_of(func, args, kwargs or {})
        if not counts:
            return func(*args, **(kwargs or {}))
        numbers = [count.read() for count in counts]
        own = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]  # some write to theirs
        expected = func(*own, **(kwargs or {}))
        given = with_counts(func, args, kwargs or {}, numbers)
        self.compared += 1
        if isinstance(expected, Tensor):
            strides = [
                [stride for stride, size in zip(each.stride(), each.shape, strict=True) if size > 1]
                for each in (given, expected)
            ]
            assert torch.equal(given, expected)
            assert (given.dtype, strides[0]) == (expected.dtype, strides[1])
        else:
            assert given == expected
        return given


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_an_operation_that_is_given_its_numbers(device: str, call: Callable[..., Any]) -> None:
    """D3: what it returns, to the bit and the stride."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).to(device)
    with _Given() as mode:
        call(x, x[:, 0] > 0, x > 0)
    assert mode.compared > 0
