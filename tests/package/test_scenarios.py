"""tests/README.md lists the behaviours that users rely on: each is named by a test, and tests name no other."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = re.findall(r"^\| ([A-Z]\d+) \|", (TESTS / "README.md").read_text(), re.MULTILINE)
# The rows that a docstring names, before its colon: "R7, A1: ...", "A1 to A3: ...".
CODES = re.compile(r"((?:[A-Z]\d+(?:, | and | to )?)+):")


@functools.cache
def named() -> list[tuple[str, str]]:
    """Return each row that the docstring of a test begins with, and the test."""
    found = []
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                codes = CODES.match(ast.get_docstring(node) or "")
                for code in re.findall(r"[A-Z]\d+", codes[1]) if codes else ():
                    found.append((code, f"{file.relative_to(TESTS)}::{node.name}"))
    return found


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.slow
def test_each_row_has_a_test(row: str) -> None:
    """So that `grep -rn '"R8' tests` finds the tests of a row, as tests/README.md says."""
    assert [test for code, test in named() if code == row]


def test_no_test_names_a_row_that_is_not_in_the_table() -> None:
    """A row that was renamed or misspelt would be looked for in vain."""
    assert not [(code, test) for code, test in named() if code not in ROWS]
