"""How what ampkit prints is written: amounts of memory, names of dtypes and types, tables, progress bars."""

import sys
from collections.abc import Sequence
from numbers import Number

import torch

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def unit_of(size: int) -> tuple[int, str]:
    """Return the largest unit of memory that is not larger than `size` bytes: its bytes, and its name."""
    return next((unit for unit in _UNITS if size >= unit[0]), _UNITS[-1])


def size_text(size: int) -> str:
    """Return a number of bytes in the largest unit that fits: with one digit behind the point, of a GiB with two."""
    unit, name = unit_of(size)
    if unit == 1:
        return f"{size} {name}"
    return f"{size / unit:.{2 if name == 'GiB' else 1}f} {name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def type_text(value: object) -> str:
    """Return the type of a value, or those of the parts of a tuple, for a message that it is the wrong one."""
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def value_text(value: object) -> str:
    """Return a number, a text, a dtype, a device, None or a tuple of these as Python writes it, cut in the middle where
    it is long; "" for anything else.
    """
    parts = value if type(value) is tuple else (value,)
    return _cut(repr(value), _LONGEST) if all(isinstance(part, _PLAIN) for part in parts) else ""


_LONGEST = 60
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)


def grid(
    rows: Sequence[Sequence[str]], texts: int, width: int = 0, shrink: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """Return a line a row, each column as wide as its widest cell.

    Args:
        rows: cells, a heading among them.
        texts: how many of the first columns are text, which begins at the left. Numbers end at the right.
        width: of the terminal, in characters.
        shrink: columns of text that give way where that is too little: which, and down to how many characters, in turn.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for column, least in shrink:
        given = max(0, min(excess, widths[column] - least))
        widths[column] -= given
        excess -= given
    return ["  ".join(_aligned(row, widths, texts)).rstrip() for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int], texts: int) -> list[str]:
    words = [_cut(cell, size).ljust(size) for cell, size in zip(row[:texts], widths[:texts], strict=True)]
    numbers = [cell.rjust(size) for cell, size in zip(row[texts:], widths[texts:], strict=True)]
    return words + numbers


def _cut(text: str, size: int) -> str:
    """Return the text with its middle left out where it is too long: a module's name stands at the end of its path."""
    if len(text) <= size:
        return text
    head = (size - 2) // 3
    return text[:head] + ".." + text[len(text) - (size - 2 - head) :]


class Bar:
    """A line on a terminal that says how much is done. Nothing where there is no terminal."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total = total
        self._done = 0
        self._shown = shown and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Count one part as begun."""
        if self._shown:
            filled = 24 * self._done // self._total
            line = f"[{'#' * filled}{'.' * (24 - filled)}] {self._done + 1}/{self._total} {text}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        self._done += 1

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
