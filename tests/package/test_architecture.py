"""The rules of the source tree, read off the syntax trees: layers, imports, where private and graph names may stand."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ampkit"

# A file imports only files of a smaller layer. Files that later issues add are listed already.
LAYERS = {
    "_undo.py": -1,
    "_arguments.py": 0,
    "_errors.py": 0,
    "_torch.py": 0,
    "_progress.py": 0,
    "_text.py": 0,
    "_holders.py": 0,
    "_op_rules.py": 1,
    "_module_rules.py": 1,
    "_policy.py": 2,
    "_function.py": 1,
    "_op_table.py": 1,
    "_record.py": 1,
    "_fake.py": 1,
    "_inputs.py": 1,
    "_blame.py": 1,
    "_problems.py": 1,
    "_reseeding.py": 1,
    "_average.py": 1,
    "_observer.py": 1,
    "_timing.py": 1,
    "_buckets.py": 2,
    "_state.py": 1,
    "_optim.py": 1,
    "_surroundings.py": 2,
    "_variation.py": 3,
    "_written.py": 1,
    "_scale_rule.py": 1,
    "_skip_watch.py": 1,
    "_scaler.py": 2,
    "_segments.py": 1,
    "_sparse.py": 1,
    "_turns.py": 1,
    "_undeclared.py": 2,
    "_overlaps.py": 2,
    "_graph.py": 2,
    "_preflight.py": 2,
    "_operations.py": 2,
    "_explain.py": 3,
    "_prefetch.py": 2,
    "_job_end.py": 1,
    "_capturing.py": 1,
    "_call_record.py": 2,
    "_rehearsal.py": 3,
    "_distributed.py": 2,
    "_verify.py": 2,
    "_cache.py": 3,
    "_recipe.py": 4,
    "_working.py": 1,
    "_engine.py": 4,
    "_graphed.py": 5,
    "_step.py": 5,
    "_lane.py": 3,
    "_passes.py": 4,
    "_node.py": 5,
    "_callables.py": 6,
    "debug/_references.py": 2,
    "debug/_cycles.py": 3,
    "debug/_trace.py": 2,
    "debug/_profile.py": 1,
    "debug/_syncs.py": 3,
    "debug/_compare.py": 3,
    "debug/_telemetry.py": 3,
    "debug/_sites.py": 4,
    "debug/_findings.py": 4,
    "debug/_numerics.py": 5,
    "debug/_categories.py": 3,
    "debug/_backward.py": 3,
    "debug/_allocator.py": 4,
    "debug/_memory.py": 4,
    "debug/_memory_plot.py": 5,
    "debug/_forecast.py": 5,
    "debug/_oom.py": 6,
    "_lightning_calls.py": 1,
    "_lightning_gradients.py": 2,
    "_lightning_reads.py": 2,
    "_lightning_limits.py": 4,
    "_lightning_precision.py": 3,
    "_lightning_stats.py": 3,
    "_lightning_step.py": 5,
    "_lightning_watch.py": 7,
    "lightning.py": 8,
    "_users_function.py": 2,
    "_command.py": 3,
    "_env.py": 1,
    "_bench_cases.py": 5,
    "_bench_process.py": 5,
    "_bench_report.py": 5,
    "_bench_plot.py": 6,
    "_bench_variants.py": 6,
    "_bench_session.py": 7,
    "_bench_profile.py": 7,
    "_bench_losses.py": 8,
    "_bench.py": 9,
    "_bench_curves.py": 9,
    "_faults.py": 7,
    "_doctor.py": 8,
    "_bench_command.py": 10,
    "__main__.py": 12,  # above the package, whose version it prints
}
PACKAGES = {"debug/__init__.py": 7, "__init__.py": 11}  # these re-export, from their own layer and below
ORDER = {**LAYERS, **PACKAGES}
OPTIONAL = {"lightning", "matplotlib", "rich", "sklearn", "torchvision", "tqdm", "triton"}
# ampkit/lightning.py imports the others; nothing else does.
IMPORT_LIGHTNING = {"lightning.py", "_lightning_limits.py", "_lightning_gradients.py", "_lightning_precision.py"}
FORBIDDEN = {"utils.py", "types.py", "config.py"}  # a helper lives with its only caller
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


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
            if file in ORDER:
                return file
    return "/".join(parts) + ".py"  # not in the table


def layer_errors(tree: ast.AST, file: str) -> Iterator[str]:
    for line, module, name, _ in imports(tree, file):
        target = imported_file(module, name)
        if target is None:
            continue
        if target not in ORDER:
            yield f"{file}:{line}: imports {target}, which is not in LAYERS"
        elif ORDER[target] > ORDER[file] or (ORDER[target] == ORDER[file] and file not in PACKAGES):
            yield f"{file}:{line}: layer {ORDER[file]} imports {target} of layer {ORDER[target]}"


def import_errors(tree: ast.AST, file: str) -> Iterator[str]:
    """At the top only standard library, torch and ampkit; inside functions only optional dependencies."""
    for line, module, _, nested in imports(tree, file):
        root = module.partition(".")[0]
        if nested and root not in OPTIONAL:
            yield f"{file}:{line}: import of {module} belongs to the top of the file"
        home = root == "lightning" and file in IMPORT_LIGHTNING
        if not nested and not home and root not in {"ampkit", "torch"} and root not in sys.stdlib_module_names:
            yield f"{file}:{line}: module-level import of {module}; `import ampkit` needs torch alone"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch_errors(tree: ast.AST, file: str) -> Iterator[str]:
    if file == "_torch.py":
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
                    yield f"{file}:{node.lineno}: {dotted} is private to torch; it belongs to _torch.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_name(node) in roots:
            yield f"{file}:{node.lineno}: {ast.unparse(node)} is private to torch; it belongs to _torch.py"


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def cuda_graph_errors(tree: ast.AST, file: str) -> Iterator[str]:
    for node in ast.walk(tree):
        used = isinstance(node, ast.Attribute) and node.attr == "CUDAGraph"
        imported = isinstance(node, ast.ImportFrom) and any(alias.name == "CUDAGraph" for alias in node.names)
        if (used or imported) and file != "_graph.py":
            yield f"{file}:{node.lineno}: CUDAGraph belongs to _graph.py"


def init_errors(tree: ast.Module, file: str) -> Iterator[str]:
    if file not in PACKAGES:
        return
    for node in tree.body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        if not (doc or isinstance(node, ast.ImportFrom) or (names and set(names) <= {"__all__", "__version__"})):
            yield f"{file}:{node.lineno}: an __init__.py only re-exports"


RULES = [layer_errors, import_errors, private_torch_errors, cuda_graph_errors, init_errors]


@pytest.mark.parametrize("file", SOURCES)
def test_file(file):
    name = file.rpartition("/")[2]
    assert name not in FORBIDDEN, f"{file}: name the file after the decision it hides"
    assert file in ORDER, f"{file}: add it to LAYERS, and to the table in the design document"
    tree = ast.parse(SOURCES[file])
    errors = [error for rule in RULES for error in rule(tree, file)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("rule", "file", "code"),
    [
        (layer_errors, "_inputs.py", "from ._graph import Graph"),
        (layer_errors, "_inputs.py", "from . import _state"),
        (layer_errors, "_inputs.py", "import ampkit"),
        (layer_errors, "_step.py", "from ampkit.debug import compare"),
        (layer_errors, "_step.py", "from ._new import f"),
        (layer_errors, "debug/_memory.py", "from .._bench import f"),
        (import_errors, "_step.py", "def f():\n    import json"),
        (import_errors, "_step.py", "import triton"),
        (import_errors, "_step.py", "try:\n    import lightning\nexcept ImportError:\n    pass"),
        (private_torch_errors, "_step.py", "import torch\ntorch._foreach_add_([], 1)"),
        (private_torch_errors, "_step.py", "import torch\ntorch.cuda._lazy_init()"),
        (private_torch_errors, "_step.py", "import torch.nn as nn\nnn._x"),
        (private_torch_errors, "_step.py", "from torch.utils._pytree import tree_flatten"),
        (private_torch_errors, "_step.py", "from torch.utils import _pytree"),
        (private_torch_errors, "_step.py", "import torch._dynamo"),
        (cuda_graph_errors, "_step.py", "import torch\ntorch.cuda.CUDAGraph()"),
        (cuda_graph_errors, "_step.py", "from torch.cuda import CUDAGraph"),
        (init_errors, "__init__.py", "def f(): ..."),
        (init_errors, "debug/__init__.py", "import torch"),
        (layer_errors, "debug/__init__.py", "from ..lightning import AmpkitCallback"),
    ],
)
def test_rule_finds(rule, file, code):
    assert len(list(rule(ast.parse(code), file))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("_scaler.py", "import torch\nfrom . import _torch\nfrom ._errors import AmpkitError\ntorch.__version__"),
        ("debug/_memory.py", "from .._graph import Graph\n\ndef plot():\n    import matplotlib.pyplot"),
        ("lightning.py", "from lightning.pytorch import Callback"),
        ("_torch.py", "import torch\nfrom torch.utils import _pytree\ntorch._foreach_add_"),
        ("_graph.py", "import torch\ntorch.cuda.CUDAGraph"),
        (
            "debug/__init__.py",
            "from ._memory import memory as memory\nfrom .._preflight import find_syncs as find_syncs",
        ),
        ("__init__.py", '"""Doc."""\nfrom ._step import f as f\n__all__ = ["f"]'),
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


def test_import_needs_torch_alone():
    """`import ampkit` loads no optional dependency that torch does not load itself, and touches no CUDA device."""
    code = f"""
import sys, torch
loaded = set(sys.modules)
import ampkit
print(sorted({OPTIONAL} & (set(sys.modules) - loaded)), torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[] False\n", 0), done.stderr
