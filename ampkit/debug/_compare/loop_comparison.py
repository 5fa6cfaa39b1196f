"""What the user gets of two compared loops: the first step that differs, its tensors, and the likely reason."""

import shutil
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._text import dtype_name, grid
from .comparison import WITHOUT_TERMINAL, coarser, distance

_SHOWN = 20  # rows of the table: they fit on a screen with the lines around them
_COLUMNS = ("tensor", "kind", "old", "new", "max absolute", "max relative", "max ulp")
_LEAST_WHERE = 12  # characters that are left of a path: begin and end of it still tell layers apart


@dataclass(frozen=True)
class DifferingTensor:
    """One tensor that differs between two loops.

    Attributes:
        path: "loss", or the parameter or buffer. The names that torch.compile and DistributedDataParallel add are left
            out.
        kind: "loss", "parameter" or "buffer".
        shapes: the shapes in the old and in the new loop; None in the loop that has no such tensor.
        dtypes: the dtypes in the old and in the new loop; None where the tensor is missing.
        absolute: the largest difference of two elements. It is inf if the shapes differ, and where only one element is
            inf or nan.
        relative: the largest difference of two elements, divided by the larger magnitude of the two: from 0 to 2.
        ulp: the largest difference in units in the last place; see `ampkit.debug.compare`.
    """

    path: str
    kind: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    absolute: float
    relative: float
    ulp: float

    def __str__(self) -> str:
        (old, new), (old_dtype, new_dtype) = self.shapes, self.dtypes
        name = self.path if self.kind == self.path else f"{self.kind} {self.path}"
        if old is None or new is None:
            return f"{name}: only the {'new' if old is None else 'old'} loop has it"
        if old != new:
            return f"{name}: shape {old} in the old loop, {new} in the new one"
        assert old_dtype is not None  # as the shape is not
        assert new_dtype is not None
        unit = f"{self.ulp:.3g} ulp of {dtype_name(coarser(old_dtype, new_dtype))}"
        dtypes = "" if old_dtype is new_dtype else f", {dtype_name(old_dtype)} and {dtype_name(new_dtype)}"
        return f"{name}: at most {self.absolute:.3g} apart, relative {self.relative:.2g}, {unit}{dtypes}"


@dataclass(frozen=True)
class LoopComparison:
    """Two training loops, compared step by step. Prints as text.

    Attributes:
        steps: how many steps the old loop has made.
        every: each how-manieth step was compared.
        step: the first compared step that differs, counted from 1; 0 if the two models differ before the first step.
            None if all are equal.
        equal_until: the last compared step in front of it, behind which everything was equal; -1 if `step` is 0.
        rows: the tensors that differ in this step: the loss, then parameters, then buffers.
        compared: how many tensors were compared in each step.
        cause: the likely reason in a word: "factory", "repeatability", "dtype", "rounding", "no update", "rate", "loss
            factor", "generators", "batch", "precision" or "unknown". "" if all are equal.
        reason: the same in a sentence, with what was measured.
        generators_part: the first compared step behind which random number generators differ, and which; None if they
            never do.
    """

    steps: int
    every: int
    step: int | None
    equal_until: int
    rows: tuple[DifferingTensor, ...]
    compared: int
    cause: str
    reason: str
    generators_part: tuple[int, tuple[str, ...]] | None

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is equal bit by bit."""
        return self.step is None

    @property
    def first(self) -> DifferingTensor | None:
        """The first tensor that differs, None if none does."""
        return self.rows[0] if self.rows else None

    def __str__(self) -> str:
        each = "" if self.every == 1 else f", compared every {self.every} steps and behind the last one"
        if self.step is None:
            lines = [
                f"{self.steps} steps are equal bit by bit ({self.compared} tensors: loss, parameters, buffers{each})"
            ]
            if self.generators_part is not None:
                step, names = self.generators_part
                where = "before the first step" if step == 0 else f"behind step {step}"
                lines.append(
                    f"but the loops draw other numbers of random values: {', '.join(names)} "
                    f"{'differs' if len(names) == 1 else 'differ'} {where}"
                )
            return "\n".join(lines)
        if self.step == 0:
            head = "the models differ before the first step"
        elif self.step - self.equal_until > 1:
            head = f"the loops differ behind step {self.step}, and were equal behind step {self.equal_until}"
        else:
            head = f"step {self.step} of {self.steps} is the first that differs"
        lines = [
            f"{head}: {len(self.rows)} of {self.compared} tensors. The first is {self.first}",
            f"likely reason ({self.cause}): {self.reason}",
            "",
        ]
        cells: list[tuple[str, ...]] = [_COLUMNS]
        for row in self.rows[:_SHOWN]:
            sides = [
                "-" if shape is None or dtype is None else f"{dtype_name(dtype)} {'x'.join(map(str, shape)) or '()'}"
                for shape, dtype in zip(row.shapes, row.dtypes, strict=True)
            ]
            cells.append((row.path, row.kind, *sides, f"{row.absolute:.3g}", f"{row.relative:.2g}", f"{row.ulp:.3g}"))
        width = shutil.get_terminal_size(WITHOUT_TERMINAL).columns
        lines += grid(cells, texts=4, width=width, shrink=[(0, _LEAST_WHERE)])
        if len(self.rows) > _SHOWN:
            lines.append(f"... {len(self.rows) - _SHOWN} more; .rows has all")
        return "\n".join(lines)


def differing(path: str, kind: str, old: Tensor | None, new: Tensor | None) -> DifferingTensor | None:
    """Return how far two tensors on the host are apart, None if they are equal bit by bit."""
    shapes = tuple(None if each is None else tuple(each.shape) for each in (old, new))
    dtypes = tuple(None if each is None else each.dtype for each in (old, new))
    absolute = relative = ulp = float("inf")
    if old is not None and new is not None and old.shape == new.shape:
        equal, _, ulp = distance(old, new)
        if equal:
            return None
        a, b = (each.to_dense() if each.layout is not torch.strided else each for each in (old, new))
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().where(~same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = torch.maximum(a.abs(), b.abs())
        absolute = apart.max().item() if apart.numel() else 0.0
        shares = (apart / largest).where(~same, 0.0).nan_to_num(nan=float("inf"))
        relative = shares.max().item() if shares.numel() else 0.0
    return DifferingTensor(path, kind, (shapes[0], shapes[1]), (dtypes[0], dtypes[1]), absolute, relative, ulp)
