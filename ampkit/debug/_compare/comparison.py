"""What the user gets of a comparison: how far apart two tensors are, a row for each, the worst, and a table."""

import math
import shutil
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._text import dtype_name, grid

_SHOWN = 20  # rows of a table that does not show all: they fit on a screen with the lines around them
_NAMED = 3  # tensors that are named, of those that only one run has: enough to recognize the part of the model
_SEEN_BY_HOOKS = (", forward", ", backward")  # how the names of these tensors end in `Comparison.only_a`
_COLUMNS = ("", "where", "direction", "shape", "a", "b", "SQNR dB", "max ulp")
_WHERE = 1  # the column that is shortened where the terminal is too narrow
_LEAST_WHERE = 12  # characters that are left of a path then: begin and end of it still tell layers apart
WITHOUT_TERMINAL = (120, 50)  # columns and lines, where the output goes to a file


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor that both runs have.

    Attributes:
        path: the module whose output it is, the parameter or buffer, or the part of what the function returned. The
            names that torch.compile and DistributedDataParallel add are left out.
        direction: "forward" (the output of a module), "backward" (the gradient of that output), "gradient" (of a
            parameter, after the run), "state" (a parameter, buffer or optimizer state, after the run) or "result" (what
            the function returned).
        call: which call of the module it was in the run, counted from 1.
        shapes: the shapes in run a and in run b.
        dtypes: the dtypes in run a and in run b.
        db: signal-to-quantization-noise ratio in decibels, `20 log10(|a| / |a - b|)` with 2-norms over the elements
            that are finite in both runs. It is inf if these elements are equal. It is -inf if the shapes differ, or if
            an element that is inf or nan in one run is not the same in the other.
        ulp: the largest distance of two elements in units in the last place; see `compare`.
        equal: whether the bits are the same, dtype and shape included.
    """

    path: str
    direction: str
    call: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    db: float
    ulp: float
    equal: bool

    def __str__(self) -> str:
        return f"{self.where}, {self.direction}: {self.distance}"

    @property
    def where(self) -> str:
        """The path and the call in words."""
        return (self.path or "(model)") + (f" (call {self.call})" if self.call > 1 else "")

    @property
    def distance(self) -> str:
        """How far apart the two are, in words."""
        if self.equal:
            return "equal bit by bit"
        if self.shapes[0] != self.shapes[1]:
            return f"shape {self.shapes[0]} in run a, {self.shapes[1]} in run b"
        if self.db == -math.inf and self.ulp == math.inf:
            return "inf or nan in one run, and not the same in the other"
        return f"SQNR {self.db:.1f} dB, at most {self.ulp:.3g} ulp of {dtype_name(coarser(*self.dtypes))}"


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared tensor by tensor. Prints as a table.

    Attributes:
        rows: the tensors that both runs have, in the order of run a.
        only_a: the tensors that only run a has, in words.
        only_b: the tensors that only run b has, in words.
        min_db: the least SQNR of tensors that count as equal. None if they must be equal bit by bit.
    """

    rows: tuple[ComparedTensor, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    min_db: float | None

    @property
    def first(self) -> ComparedTensor | None:
        """The first tensor that differs, None if none does."""
        return next((row for row in self.rows if self._differs(row)), None)

    @property
    def worst(self) -> ComparedTensor | None:
        """The tensor with the lowest SQNR, the first of several. None if all are equal bit by bit."""
        return min((row for row in self.rows if not row.equal), key=lambda row: (row.db, -row.ulp), default=None)

    def _differs(self, row: ComparedTensor) -> bool:
        if self.min_db is None:
            return not row.equal
        return row.db < self.min_db

    def table(self, all: bool = False) -> str:
        """Return the table.

        Args:
            all: show every row. Otherwise the first that differs and the worst are shown, in the order of the run.
        """
        first, rows = self.first, list(self.rows)
        if not all:
            apart = (row for row in rows if not row.equal and row is not first)
            worst = sorted(apart, key=lambda row: (row.db, -row.ulp))
            shown = [*([first] if first else []), *worst][:_SHOWN]
            rows = [row for row in rows if any(row is other for other in shown)]
        threshold = "bit by bit" if self.min_db is None else f"to {self.min_db:g} dB"
        head = f"{len(self.rows)} tensors are equal {threshold}"
        if first is not None:
            differ = sum(map(self._differs, self.rows))
            head = f"{differ} of {len(self.rows)} tensors are not equal {threshold}. The first is {first}"
        lines = [head]
        for run, names in (("a", self.only_a), ("b", self.only_b)):
            hooked = [name for name in names if name.endswith(_SEEN_BY_HOOKS)]
            others = [name for name in names if not name.endswith(_SEEN_BY_HOOKS)]
            for some, why in ((hooked, " (replayed graphs and compiled code call no hooks)"), (others, "")):
                if some:
                    tensors, more = "tensors" if len(some) > 1 else "tensor", "; ..." if len(some) > _NAMED else ""
                    named = "; ".join(some[:_NAMED])
                    lines.append(f"{len(some)} {tensors} only in run {run}{why}: {named}{more}")
        if rows:
            cells: list[tuple[str, ...]] = [_COLUMNS]
            for row in rows:
                numbers = ("equal", "") if row.equal else (f"{row.db:.1f}", f"{row.ulp:.3g}")
                shape = "x".join(map(str, row.shapes[0])) or "()"
                mark, dtypes = ">" if row is first else "", map(dtype_name, row.dtypes)
                cells.append((mark, row.where, row.direction, shape, *dtypes, *numbers))
            width = shutil.get_terminal_size(WITHOUT_TERMINAL).columns
            lines += ["", *grid(cells, texts=6, width=width, shrink=[(_WHERE, _LEAST_WHERE)])]
        if len(rows) < len(self.rows):
            lines.append(f"... {len(self.rows) - len(rows)} more rows; .table(all=True) shows all")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def distance(a: Tensor, b: Tensor) -> tuple[bool, float, float]:
    """Return whether two tensors are equal bit by bit, their SQNR in dB, and their largest distance in ulp.

    See `ComparedTensor` for what the numbers mean. Both have the same shape, and are on the same device. Sync: waits.
    """
    a, b = (each if each.layout is torch.strided else each.to_dense() for each in (a, b))
    a, b = (torch.view_as_real(each) if each.is_complex() else each for each in (a, b))
    same_dtype = a.dtype is b.dtype
    if same_dtype and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))):  # sync
        return True, math.inf, 0.0
    if not a.numel():
        return False, math.inf, 0.0
    dtype = coarser(a.dtype, b.dtype)
    a, b = a.double(), b.double()
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((~finite & ~same).any()):  # sync
        return False, -math.inf, math.inf
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    ulp = ulp_of(torch.maximum(a.abs(), b.abs()), dtype)
    error, unit = a - b, 1.0
    if bool(error.isinf().any()):  # sync; the difference is too large for float64, half of it is not
        error, unit = a / 2 - b / 2, 0.5
    ulps = (error.abs() / ulp).max().item() / unit  # sync
    noise = _decibels(error)
    return False, math.inf if noise == -math.inf else _decibels(a * unit) - noise, ulps


def _decibels(values: Tensor) -> float:
    """Return `20 log10` of the 2-norm, also where squares leave float64; -inf for zeros. Sync: waits for the device."""
    largest = values.abs().max().item()  # sync
    if largest == 0:
        return -math.inf
    return 20 * (math.log10(largest) + math.log10((values / largest).norm().item()))  # sync


def ulp_of(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit in the last place that float64 magnitudes have in a format; `compare` has the definition."""
    if not dtype.is_floating_point:
        return torch.ones_like(magnitude)
    info = torch.finfo(dtype)  # eps is 2 ** (1 - p), smallest_normal is 2 ** e_min
    exponent = torch.frexp(magnitude).exponent - 1  # frexp has mantissas in [0.5, 1)
    power = torch.ldexp(torch.ones_like(magnitude), exponent)
    return power.clamp_min(info.smallest_normal) * info.eps


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype of lower precision. It is an integer one only if both are."""
    a, b = (dtype.to_real() if dtype.is_complex else dtype for dtype in (a, b))
    return max((a, b), key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else -1.0)
