"""How large the files, folders and functions of ampkit are, how much is commented, and how deep imports go.

python tests/support/source_numbers.py          `make numbers`
"""

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from source_tree import PACKAGE, files_of_folders, levels

# What to stay under: median and 90th percentile of equinox, optimistix and httpx, and the longest body allowed.
FILES, BODIES, LONGEST = (200, 450), (7, 30), 45
# Files in a folder, levels of imports, functions and private ones per 1,000 lines.
FOLDER, LEVELS, FUNCTIONS = 14, 22, (60, 18)


class Function(NamedTuple):
    """A function, how many lines its body has without its docstring, and whether its name is private."""

    lines: int
    where: str
    private: bool


class Ignore(NamedTuple):
    """A `type: ignore`, and the reason behind it, "" if there is none."""

    where: str
    reason: str


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            private = node.name.startswith("_") and not node.name.startswith("__")
            yield Function(lines, f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", private)


def comments(path: Path) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def ignores(path: Path) -> Iterator[Ignore]:
    for token in comments(path):
        if found := re.search(r"type: ignore(?:\[[\w, -]+\])?(.*)", token.string):
            yield Ignore(f"{path.relative_to(PACKAGE)}:{token.start[0]}", found[1].strip(" #"))


def docstring_lines(path: Path) -> int:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    docs = (owner.body[0] for owner in owners if owner.body and ast.get_docstring(owner))
    return sum((doc.end_lineno or doc.lineno) - doc.lineno + 1 for doc in docs)


def spread(values: list[int]) -> tuple[float, float]:
    """Return median and 90th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=10)[-1]


def main() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    files = [len(path.read_text().splitlines()) for path in paths if path.name != "__init__.py"]
    most, folder = max((len(found), folder) for folder, found in files_of_folders().items())
    filled = sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())
    bodies = sorted((function for path in paths for function in functions(path)), reverse=True)
    found = [ignore for path in paths for ignore in ignores(path)]
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    median, high = spread(files)
    print(f"{len(entries)} entries in ampkit/, {len(files)} files, {sum(files)} lines")
    print(f"largest folder: {most} files, {folder}/ (aim {FOLDER}); {len(levels())} levels of imports (aim {LEVELS})")
    every, private = (round(1000 * n / sum(files)) for n in (len(bodies), sum(each.private for each in bodies)))
    print(f"functions per 1,000 lines: {every}, private {private} (aim {FUNCTIONS[0]}, {FUNCTIONS[1]})")
    print(f"files: median {median:.0f}, 90th percentile {high:.0f} lines (aim {FILES[0]}, {FILES[1]})")
    median, high = spread([function.lines for function in bodies])
    print(f"bodies: median {median:.0f}, 90th percentile {high:.0f} lines (aim {BODIES[0]}, {BODIES[1]})")
    for function in bodies:
        if function.lines > LONGEST:
            print(f"  {function.lines} lines: {function.where}")
    print(f"comments: {100 * sum(len(comments(path)) for path in paths) / filled:.1f} per 100 lines that are not blank")
    print(f"docstrings: {100 * sum(map(docstring_lines, paths)) / filled:.1f} lines per 100")
    print(f"type: ignore: {len(found)}, {sum(not ignore.reason for ignore in found)} of them without a reason")
    for ignore in found:
        if not ignore.reason:
            print(f"  {ignore.where}")


if __name__ == "__main__":
    main()
