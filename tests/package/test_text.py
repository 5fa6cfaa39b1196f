"""What is printed: memory in the unit that fits, names of dtypes and types, columns within a width."""

import pytest
import torch

from ampkit._text import dtype_name, grid, size_text, type_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 2**10, "1023.0 KiB"),
        (13 * 2**20 + 2**19, "13.5 MiB"),
        (2**31, "2.00 GiB"),
        (5 * 2**40, "5120.00 GiB"),
    ],
)
def test_size(size: int, text: str) -> None:
    """The largest unit of which there is one, with a digit behind the point; of a GiB, two; of bytes, none."""
    assert size_text(size) == text


def test_names() -> None:
    """A dtype goes without its package; of a tuple each part has its type."""
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert type_text((1, torch.ones(2), None)) == "(int, Tensor, NoneType)"
    assert type_text([1]) == "list"


ROWS = [("module", "what", "runs"), ("layers.0.attention.out", "linear", "1"), ("head", "scaled_dot_product", "12")]


def test_grid_as_wide_as_its_cells() -> None:
    """Text begins at the left, numbers end at the right, nothing is behind the last character."""
    assert grid([*ROWS, ("", "", "")], texts=2) == [
        "module                  what                runs",
        "layers.0.attention.out  linear                 1",
        "head                    scaled_dot_product    12",
        "",
    ]


@pytest.mark.parametrize(
    ("width", "widths"),
    [(48, (22, 18)), (45, (19, 18)), (42, (16, 18)), (41, (16, 17)), (34, (16, 10)), (33, (15, 10)), (20, (8, 10))],
)
def test_grid_gives_way_in_turn(width: int, widths: tuple[int, int]) -> None:
    """Columns shrink in the order that is asked for, each to its least, and no further where that is not enough."""
    lines = grid(ROWS, texts=2, width=width, shrink=[(0, 16), (1, 10), (0, 8)])
    assert (lines[0].index("what") - 2, lines[0].index("runs") - lines[0].index("what") - 2) == widths
    assert max(map(len, lines)) == max(width, 8 + 10 + 4 + 2 * 2)


def test_grid_cuts_the_middle() -> None:
    """Of a long text the end is left, which tells modules apart, and some of its beginning."""
    assert grid(ROWS, texts=2, width=42, shrink=[(0, 16)])[1].startswith("laye..ention.out  linear")
