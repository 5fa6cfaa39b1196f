"""The rules of the source tree, read off the syntax trees: layers, imports, where private and graph names may stand."""

import ast
import collections
import graphlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, SOURCES, Import, files_of_folders, imported_file, imports, levels, needs, tree

# A file imports only from entries of a smaller layer, and from its own folder without a cycle.
LAYERS = (
    ("_errors.py", "_undo.py"),
    ("_torch",),
    ("_arguments.py", "_text.py", "_user_line.py"),
    ("_precision",),
    ("_optimizer",),
    ("_capture",),
    ("_batches", "_callables"),
    ("_step",),
    ("debug",),
    ("lightning", "transformers"),
    ("_commands",),
    ("__init__.py",),
    ("__main__.py",),  # above the package, whose version it prints
)
LAYER = {entry: number for number, entries in enumerate(LAYERS) for entry in entries}
# What a room of a folder imports from, beside itself. "." are the files that have no room. Some files are one each.
ROOMS = {
    "_torch": {
        "guard.py": "",
        "tensors": "guard.py",
        "autograd": "guard.py tensors",
        "device": "guard.py tensors",
        "ranks": "guard.py tensors autograd device",
        "optimizers.py": "guard.py tensors",
        "compiler_code.py": "guard.py",
        "compile.py": "guard.py tensors device compiler_code.py",
    },
    "_capture": {
        "keys": "",
        "host": "",
        "graph": "keys",
        "state": "keys host",
        "preflight": "host state",
        "ranks": "graph",
        "compare": "graph state ranks",
        "engine": "keys host graph state preflight ranks compare",
    },
    "_step": {
        ".": "",
        "many": ".",
        "compile": ".",
        "parts": ".",
        "graphed.py": ". many compile parts",
        "step_calls.py": ". many compile",
        "graphed_step.py": ". compile parts step_calls.py",
    },
}
MOST_ENTRIES = 19  # of the package: more is no map
MOST_FILES = 14  # of a folder, beside its __init__.py
MOST_LEVELS = 22  # of imports, from a file that needs no other to the one at the top
GRAPH = "_capture/graph/graph.py"
LAYOUTS = "_capture/engine/layouts.py"
MODULE = re.compile(r"ampkit(\.\w+)+")
OPTIONAL = {"lightning", "matplotlib", "numpy", "rich", "sklearn", "torchao", "torchvision", "tqdm", "triton"}
FORBIDDEN = {"utils.py", "types.py", "config.py"}  # a helper lives with its only caller

TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
# The last two parts of the name of each module.
MODULES = {tuple(["ampkit", *re.sub(r"(/__init__)?\.py$", "", file).split("/")][-2:]) for file in SOURCES}


def imported_late(tree: ast.AST) -> Iterator[Import]:
    """Yield what `importlib.import_module("ampkit...")` and `find_spec` name, which no import statement shows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            module, _, name = node.value.rpartition(".")
            yield Import(node.lineno, module, name, True)


def layer_errors(tree: ast.AST, file: str) -> Iterator[str]:
    own = file.partition("/")[0]
    for line, module, name, _ in (*imports(tree, file), *imported_late(tree)):
        target = imported_file(module, name)
        if target is None:
            continue
        entry = target.partition("/")[0]
        if target not in SOURCES:
            yield f"{file}:{line}: imports {target}, which does not exist"
        elif entry != own and LAYER[entry] >= LAYER[own]:
            yield f"{file}:{line}: layer {LAYER[own]} imports {target} of layer {LAYER[entry]}"


def room_of(file: str) -> str:
    """Return the room that a file of a folder in `ROOMS` is in."""
    folder, name, *_ = file.split("/")
    return name if name in ROOMS[folder] or not name.endswith(".py") else "."


def room_errors(tree: ast.AST, file: str) -> Iterator[str]:
    folder = file.partition("/")[0]
    if folder not in ROOMS or file.endswith("__init__.py"):
        return
    own, rooms = room_of(file), ROOMS[folder]
    if own not in rooms:
        yield f"{file}: ROOMS does not say what {own} of {folder} may import"
        return
    for line, module, name, _ in imports(tree, file):
        target = imported_file(module, name) or ""
        if target.startswith(f"{folder}/") and room_of(target) not in [own, *rooms[own].split()]:
            yield f"{file}:{line}: {own} of {folder} imports {target}"


def words(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts without white space that are no docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        if text and not re.search(r"\s", node.value):
            yield node


def file_name_errors(tree: ast.AST, file: str) -> Iterator[str]:
    """A file of ampkit's that is named by a string is missed when it is renamed: it registers itself instead."""
    names = {path.rpartition("/")[2] for path in SOURCES} - {"__init__.py", "__main__.py"}
    for node in words(tree):
        if names & set(re.findall(r"\w+\.py\b", node.value)):
            yield f"{file}:{node.lineno}: {node.value!r} names a file of ampkit"


def module_name_errors(tree: ast.AST, file: str) -> Iterator[str]:
    """The same for a private module, whose name may be written in part, as in `name.endswith("_capture.engine")`."""
    for node in words(tree):
        parts = node.value.split(".")
        named = any(pair in MODULES for pair in itertools.pairwise(parts))
        if named and (any(map(is_private, parts)) or not MODULE.fullmatch(node.value)):
            yield f"{file}:{node.lineno}: {node.value!r} names a module of ampkit"


def import_errors(tree: ast.AST, file: str) -> Iterator[str]:
    """At the top only standard library, torch and ampkit; inside functions only optional dependencies."""
    for line, module, _, nested in imports(tree, file):
        root = module.partition(".")[0]
        if nested and root not in OPTIONAL:
            yield f"{file}:{line}: import of {module} belongs to the top of the file"
        home = root in {"lightning", "torchmetrics"} and file.startswith("lightning/")  # the one needs the other
        if not nested and not home and root not in {"ampkit", "torch"} and root not in sys.stdlib_module_names:
            yield f"{file}:{line}: module-level import of {module}; `import ampkit` needs torch alone"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch_errors(tree: ast.AST, file: str) -> Iterator[str]:
    if file.startswith("_torch/"):
        return
    roots = {"torch"}  # names that stand for torch or for something imported from it
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                inside = isinstance(node, ast.ImportFrom)
                dotted = f"{node.module}.{alias.name}" if inside else alias.name
                if dotted.partition(".")[0] != "torch" or (inside and node.level):
                    continue
                roots.add(alias.asname or (alias.name if inside else "torch"))
                if any(map(is_private, dotted.split("."))):
                    yield f"{file}:{node.lineno}: {dotted} is private to torch; it belongs to _torch/"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_name(node) in roots:
            yield f"{file}:{node.lineno}: {ast.unparse(node)} is private to torch; it belongs to _torch/"


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def cuda_graph_errors(tree: ast.AST, file: str) -> Iterator[str]:
    for node in ast.walk(tree):
        used = isinstance(node, ast.Attribute) and node.attr == "CUDAGraph"
        imported = isinstance(node, ast.ImportFrom) and any(alias.name == "CUDAGraph" for alias in node.names)
        if (used or imported) and file != GRAPH:
            yield f"{file}:{node.lineno}: CUDAGraph belongs to {GRAPH}"


def init_errors(tree: ast.Module, file: str) -> Iterator[str]:
    if not file.endswith("__init__.py"):
        return
    for node in tree.body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        exports = isinstance(node, ast.ImportFrom) or (names and set(names) <= {"__all__", "__version__"})
        if not (doc or exports or (file == "__init__.py" and only_imports_later(node))):
            yield f"{file}:{node.lineno}: an __init__.py only re-exports"


def only_imports_later(node: ast.stmt) -> bool:
    """Return whether a statement is part of an import that waits until its name is asked for (PEP 562)."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "_typing.TYPE_CHECKING":
        names = {getattr(each, "name", "") for each in node.orelse}
        return all(isinstance(each, ast.ImportFrom) for each in node.body) and names <= {"__getattr__", "__dir__"}
    return isinstance(node, ast.Import) and all(is_private(each.asname or "") for each in node.names)


def layout_errors(tree: ast.Module, file: str) -> Iterator[str]:
    """How far a layout is has one owner, which has methods for what others find out."""
    if not file.startswith("_capture/engine/") or file == LAYOUTS:
        return
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and root_name(node) in ("layout", "cold", "stage"):
            yield f"{file}:{node.lineno}: only {LAYOUTS} sets {ast.unparse(node)}"


RULES = [
    layer_errors,
    room_errors,
    file_name_errors,
    module_name_errors,
    import_errors,
    private_torch_errors,
    cuda_graph_errors,
    init_errors,
    layout_errors,
]


@pytest.mark.parametrize("file", SOURCES)
def test_file(file):
    name = file.rpartition("/")[2]
    assert name not in FORBIDDEN, f"{file}: name the file after the decision it hides"
    assert file.partition("/")[0] in LAYER, f"{file}: its folder has no layer"
    errors = [error for rule in RULES for error in rule(tree(file), file)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
@pytest.mark.slow
def test_names_in_tests(path):
    """What a text in a test names of ampkit, such as what it replaces, is there: a file, or a module with that name."""
    for node in words(ast.parse(path.read_text())):
        name = node.value
        if re.fullmatch(r"_\w+(/\w+)+\.py", name):
            assert name in SOURCES, f"{path.name}:{node.lineno}: there is no {name}"
        elif MODULE.fullmatch(name) and "._" in name:
            module, attribute = name.rsplit(".", 1)
            found = imported_file(module, None)
            assert found in SOURCES, f"{path.name}:{node.lineno}: there is no {found}"
            known = {attribute} <= set(re.findall(r"\w+", SOURCES[found])) or imported_file(module, attribute) != found
            assert known, f"{path.name}:{node.lineno}: {found} has no {attribute}"


def test_no_cycle_within_a_folder():
    graph = needs()
    assert set(graphlib.TopologicalSorter(graph).static_order()) == set(graph)  # a CycleError names its files


def test_a_folder_shows_few_files_and_stands_on_few_levels():
    crowded = {folder: len(files) for folder, files in files_of_folders().items() if len(files) > MOST_FILES}
    assert not crowded
    assert len(levels()) <= MOST_LEVELS, " > ".join(levels())


def test_rooms_import_what_they_may():
    """An arrow that `ROOMS` allows and nobody needs any more is taken out."""
    for folder, rooms in ROOMS.items():
        graph = {file: targets for file, targets in needs().items() if file.startswith(f"{folder}/")}
        arrows = {(room_of(file), room_of(target)) for file in graph for target in graph[file] & graph.keys()}
        allowed = {(room, each) for room, others in rooms.items() for each in others.split()}
        assert {arrow for arrow in arrows if arrow[0] != arrow[1]} == allowed, folder


def test_the_map_says_who_may_import_a_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"\| `(_\w+)/(\w+)/` \|.*\|(.*)\|\n", text)
    told = {(folder, room): set(re.findall(r"`(\w+)`", others)) for folder, room, others in rows}
    for (folder, room), others in told.items():
        may = {each.removesuffix(".py") for each, needed in ROOMS[folder].items() if room in needed.split()}
        assert others == may, room
    assert told.keys() == {(folder, room) for folder in ROOMS for room in ROOMS[folder] if room.isidentifier()}


def test_no_class_has_the_name_of_another():
    """A name that stands for two things has to be looked up each time. A leading underscore makes no other name."""
    classes = collections.defaultdict(list)
    for file in SOURCES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{file}:{node.lineno}")
    assert not {name: places for name, places in classes.items() if len(places) > 1}


def test_the_package_is_a_map():
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES
    assert set(entries) <= {*LAYER, "py.typed"}


@pytest.mark.parametrize(
    ("rule", "file", "code"),
    [
        (layer_errors, "_capture/keys/inputs.py", "from ..._step.graphed import graphed"),
        (layer_errors, "_capture/keys/inputs.py", "from ...debug import compare"),
        (layer_errors, "_capture/keys/inputs.py", "import ampkit"),
        (layer_errors, "_capture/keys/inputs.py", "import importlib\nimportlib.import_module('ampkit.lightning')"),
        (layer_errors, "_step/graphed.py", "from ampkit.debug import compare"),
        (layer_errors, "_step/graphed.py", "from ._new import f"),
        (layer_errors, "_batches/buckets.py", "from .._callables.passes import f"),
        (layer_errors, "debug/_syncs.py", "from .._commands.bench.measure import f"),
        (room_errors, "_capture/graph/cache.py", "from ..state.watch import Look"),
        (room_errors, "_capture/keys/key.py", "from ..host.constants import are_same"),
        (room_errors, "_capture/key.py", "import torch"),
        (room_errors, "_torch/tensors/tree.py", "from ..optimizers import step_hooks"),
        (room_errors, "_step/window.py", "from .graphed import graphed"),
        (room_errors, "_step/many/scan.py", "from ..parts.split import StepSplitter"),
        (file_name_errors, "_user_line.py", "WRAPPERS = ['preflight.py']"),
        (file_name_errors, "_user_line.py", "WRAPPERS = [f'{folder}_syncs.py']"),
        (module_name_errors, "_user_line.py", "def f(name):\n    return name.endswith('engine.engine')"),
        (module_name_errors, "_user_line.py", "OWN = ('ampkit._capture.engine',)"),
        (module_name_errors, "_user_line.py", "OWN = f'{package}._capture.engine.Engine'"),
        (module_name_errors, "_user_line.py", "OWN = 'ampkit._capture'"),
        (import_errors, "_step/graphed.py", "def f():\n    import json"),
        (import_errors, "_step/graphed.py", "import triton"),
        (import_errors, "_step/graphed.py", "try:\n    import lightning\nexcept ImportError:\n    pass"),
        (private_torch_errors, "_step/graphed.py", "import torch\ntorch._foreach_add_([], 1)"),
        (private_torch_errors, "_step/graphed.py", "import torch\ntorch.cuda._lazy_init()"),
        (private_torch_errors, "_step/graphed.py", "import torch.nn as nn\nnn._x"),
        (private_torch_errors, "_step/graphed.py", "from torch.utils._pytree import tree_flatten"),
        (private_torch_errors, "_step/graphed.py", "from torch.utils import _pytree"),
        (private_torch_errors, "_step/graphed.py", "import torch._dynamo"),
        (cuda_graph_errors, "_step/graphed.py", "import torch\ntorch.cuda.CUDAGraph()"),
        (cuda_graph_errors, "_step/graphed.py", "from torch.cuda import CUDAGraph"),
        (init_errors, "__init__.py", "def f(): ..."),
        (init_errors, "__init__.py", "import typing"),
        (init_errors, "__init__.py", "import typing as _typing\nif _typing.TYPE_CHECKING:\n    x = 1"),
        (init_errors, "debug/__init__.py", "import torch"),
        (layout_errors, "_capture/engine/warm_up.py", "layout.problem = ''"),
        (layout_errors, "_capture/engine/engine.py", "def f(cold):\n    cold.calls += 1"),
        (init_errors, "debug/__init__.py", "import torch as _torch"),
        (layer_errors, "debug/__init__.py", "from ..lightning import AmpkitCallback"),
    ],
)
def test_rule_finds(rule, file, code):
    assert len(list(rule(ast.parse(code), file))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("_optimizer/scaler.py", "import torch\nfrom .._errors import AmpkitError\ntorch.__version__"),
        ("debug/_syncs.py", "from .._capture.graph.graph import Graph\n\ndef plot():\n    import matplotlib.pyplot"),
        ("lightning/_callback.py", "from lightning.pytorch import Callback"),
        ("_capture/compare/verify.py", "from ..graph.cache import Captured\nfrom .rehearsal import Rehearsal"),
        ("_step/graphed.py", "from .parts.split import StepSplitter\nfrom .window import Window"),
        ("_torch/tensors/tree.py", "import torch\nfrom torch.utils import _pytree\ntorch._foreach_add_"),
        ("_capture/graph/graph.py", "import torch\ntorch.cuda.CUDAGraph"),
        ("_capture/engine/layouts.py", "def f(cold):\n    cold.calls += 1"),
        ("_capture/engine/warm_up.py", "def f(layout):\n    layout.refuse('')\n    layout.timing.eager.add(1, 2)"),
        ("_commands/bench/variants.py", "import importlib\nimportlib.import_module('ampkit.lightning')"),
        (
            "debug/__init__.py",
            "from ._compare import compare as compare\nfrom .._capture.preflight.preflight import describe as describe",
        ),
        ("__init__.py", '"""Doc."""\nfrom ._step.graphed import graphed as graphed\n__all__ = ["graphed"]'),
    ],
)
def test_rules_allow(file, code):
    assert not [error for rule in RULES for error in rule(ast.parse(code), file)]


def test_sources_are_ascii():
    strays = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("ampkit", "docs", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert not strays
