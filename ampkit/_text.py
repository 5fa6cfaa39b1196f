"""How ampkit writes text: amounts of memory, names of dtypes and types, tables, progress bars."""

import sys
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch

# Values that nothing can change: a graph holds them as constants, and they are written as they are.
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_nans: dict[str, float | complex] = {}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_BAR_WIDTH = 24  # characters; leaves half of a line of 80 for the text behind it


def comparable(value: Any) -> Any:
    """Return a value that is equal to itself within a tuple: of each nan the same object, else the value."""
    return _nans.setdefault(repr(value), value) if type(value) in (float, complex) and value != value else value


def unit_of(size: int) -> tuple[int, str]:
    """Return the largest unit of memory that fits into `size` bytes: how many bytes it has, and its name."""
    return next((unit for unit in _UNITS if size >= unit[0]), _UNITS[-1])


def size_text(size: int) -> str:
    """Return a number of bytes in the largest unit that fits. GiB get two digits after the point, KiB and MiB one."""
    unit, name = unit_of(size)
    if unit == 1:
        return f"{size} {name}"
    return f"{size / unit:.{2 if name == 'GiB' else 1}f} {name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def type_text(value: object) -> str:
    """Return the name of a value's type, of a tuple the names of its parts' types, for an error message."""
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def error_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def value_text(value: object) -> str:
    """Return a number, a text, a dtype, a device, None or a tuple of these as Python writes it, cut in the middle where
    it is long; "" for anything else.
    """
    parts = value if type(value) is tuple else (value,)
    if not all(isinstance(part, _PLAIN) for part in parts):
        return ""
    try:
        return _cut(repr(value), _LONGEST)
    except Exception:  # of a class of the user's
        return ""


_LONGEST = 60
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)


def grid(
    rows: Sequence[Sequence[str]], texts: int, width: int = 0, shrink: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """Return a table as one line for each row. A column is as wide as its widest cell.

    Args:
        rows: the cells of each row. The heading is one of the rows.
        texts: how many columns, from the left, hold text and are aligned left. The others are aligned right.
        width: how many characters a line may have.
        shrink: which columns of text to shorten, in this order, until lines fit into `width`: `(column, characters)`,
            where the column keeps at least so many characters.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for column, least in shrink:
        given = max(0, min(excess, widths[column] - least))
        widths[column] -= given
        excess -= given
    lines = []
    for row in rows:
        words = [_cut(cell, size).ljust(size) for cell, size in zip(row[:texts], widths[:texts], strict=True)]
        numbers = [cell.rjust(size) for cell, size in zip(row[texts:], widths[texts:], strict=True)]
        lines.append("  ".join(words + numbers).rstrip())
    return lines


def _cut(text: str, size: int) -> str:
    """Return the text, without its middle if it is too long. The end of a module's path is its name, so it stays."""
    if len(text) <= size:
        return text
    head = (size - 2) // 3
    return text[:head] + ".." + text[len(text) - (size - 2 - head) :]


class ProgressBar:
    """A line on a terminal that says how much is done. Without a terminal it prints nothing."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total = total
        self._done = 0
        self._shown = shown and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Count one more part as begun, and say what it is."""
        if self._shown:
            filled = _BAR_WIDTH * self._done // self._total
            line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {self._done + 1}/{self._total} {text}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        self._done += 1

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
