"""The source files of ampkit, and which of them imports which, read off the syntax trees."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ampkit"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Import(NamedTuple):
    line: int
    module: str  # absolute and dotted
    name: str | None  # what `from module import` takes
    nested: bool  # inside a function or a class


def imports(node: ast.AST, file: str, nested: bool = False) -> Iterator[Import]:
    """Yield every import below a node of the given file."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, None, nested)
        elif isinstance(child, ast.ImportFrom):
            package = ["ampkit", *file.split("/")[:-1]]
            above = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*above, *filter(None, [child.module])])
            for alias in child.names:
                yield Import(child.lineno, module, alias.name, nested)
        else:
            yield from imports(child, file, nested or isinstance(child, SCOPES))


def imported_file(module: str, name: str | None) -> str | None:
    """Return the file of ampkit that the import reads, or None where it reads another package."""
    if module.partition(".")[0] != "ampkit":
        return None
    parts = module.split(".")[1:]
    tries = [[*parts, name]] if name else []
    for path in (*tries, parts):
        for file in ("/".join(path) + ".py", "/".join([*path, "__init__.py"])):
            if file in SOURCES:
                return file
    return "/".join(parts) + ".py"  # no such file


def files_of_folders() -> dict[str, list[str]]:
    """Return the files of each folder beside its `__init__.py`."""
    found = defaultdict(list)
    for file in SOURCES:
        folder, _, name = file.rpartition("/")
        if name != "__init__.py":
            found[folder].append(file)
    return dict(found)


@functools.cache
def tree(file: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(SOURCES[file])


@functools.cache
def needs() -> dict[str, set[str]]:
    """Return the files that each file imports. An `__init__.py` is left out: it decides nothing."""
    graph = {file: set() for files in files_of_folders().values() for file in files}
    for file in graph:
        found = imports(tree(file), file)
        graph[file] = {imported_file(each.module, each.name) for each in found} & graph.keys() - {file}
    return graph


@functools.cache
def levels() -> list[str]:
    """Return the longest chain of files that import each other, the uppermost first."""
    graph = needs()

    @functools.cache
    def below(file: str) -> tuple[str, ...]:
        return (file, *max(map(below, sorted(graph[file])), key=len, default=()))

    return list(max(map(below, graph), key=len))
