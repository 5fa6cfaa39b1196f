"""What the user gets of a comparison: one row for each tensor, the first that differs, the worst, and a table."""

import math
import shutil
from dataclasses import dataclass

import torch

from ..._text import dtype_name, grid
from .distance import coarser

_SHOWN = 20  # rows of a table that does not show all: they fit on a screen with the lines around them
_NAMED = 3  # tensors that are named, of those that only one run has: enough to recognize the part of the model
_SEEN_BY_HOOKS = (", forward", ", backward")  # how the names of these tensors end in `Comparison.only_a`
_COLUMNS = ("", "where", "direction", "shape", "a", "b", "SQNR dB", "max ulp")
_WHERE = 1  # the column that is shortened where the terminal is too narrow
_LEAST_WHERE = 12  # characters that are left of a path then: begin and end of it still tell layers apart
_WITHOUT_TERMINAL = (120, 50)  # columns and lines, where the output goes to a file


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
            width = shutil.get_terminal_size(_WITHOUT_TERMINAL).columns
            lines += ["", *grid(cells, texts=6, width=width, shrink=[(_WHERE, _LEAST_WHERE)])]
        if len(rows) < len(self.rows):
            lines.append(f"... {len(self.rows) - len(rows)} more rows; .table(all=True) shows all")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()
