"""The public surface is frozen: adding a name means editing the list on purpose."""

import inspect
import subprocess
import sys

import pytest

import ampkit

PUBLIC_NAMES = [
    "AmpkitError",
    "AmpkitWarning",
    "Buckets",
    "CaptureError",
    "CaptureWarning",
    "Explanation",
    "GradScaler",
    "GraphReport",
    "GraphedFunction",
    "GraphedStep",
    "HostConstant",
    "HostConstants",
    "InputMismatch",
    "OpTable",
    "Policy",
    "Report",
    "ScalerStats",
    "StepOutput",
    "custom_bwd",
    "custom_fwd",
    "debug",
    "explain",
    "graphed",
    "graphed_step",
    "make_graphed_callables",
    "op_table",
    "prefetch",
]


def test_public_names():
    public = {name for name in dir(ampkit) if not name.startswith("_")}
    assert sorted(ampkit.__all__) == PUBLIC_NAMES
    assert public - {"lightning"} == set(ampkit.__all__)  # lightning is imported on demand


def modules_of(code: str) -> set[str]:
    """Return the modules that some code imports in a new process which has imported torch before."""
    lines = ["import sys, torch", "before = {*sys.modules}", code, "print(*{*sys.modules} - before)"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_an_import_brings_along():
    """All that it adds to torch is ampkit without debug, commands and Lightning, one module of torch, and Python's."""
    found = modules_of("import ampkit\nassert 'debug' in dir(ampkit)\nassert not hasattr(ampkit, 'none')")
    own = {name for name in found if name.partition(".")[0] == "ampkit"}
    assert "ampkit._step.graphed_step" in own
    assert not [name for name in own if name.split(".")[1:2] in (["debug"], ["_commands"], ["lightning"])]
    others = {name for name in found - own if name.partition(".")[0] not in sys.stdlib_module_names}
    others -= {name for name in others if name.startswith("_sysconfigdata_")}  # Python's, named after the machine
    assert others <= {"torch.utils._device"}


def test_debug_is_imported_when_it_is_asked_for():
    code = "import ampkit\nmemory = ampkit.debug.memory\nfrom ampkit import debug\nassert debug.memory is memory"
    assert {"ampkit.debug", "ampkit.debug._memory.recorder"} <= modules_of(code)


def test_version():
    assert isinstance(ampkit.__version__, str)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_docstring(name):
    """Every public name has one, and so have the methods and properties that it defines itself."""
    subject = getattr(ampkit, name)
    members = vars(subject).items() if inspect.isclass(subject) else ()
    documented = [key for key, value in members if inspect.isroutine(value) or isinstance(value, property)]
    bare = [key for key in documented if not key.startswith("_") and not inspect.getdoc(vars(subject)[key])]
    assert subject.__doc__, f"{name} has no docstring"
    assert not bare, f"members of {name} without a docstring: {bare}"
