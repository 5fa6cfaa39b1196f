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
    "NonfiniteError",
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
    assert public - {"lightning", "transformers"} == set(ampkit.__all__)  # both are imported on demand


IMPORTS = """
import sys, torch
before = {*sys.modules}
import ampkit
assert 'debug' in dir(ampkit)
assert not hasattr(ampkit, 'none')
assert not torch.cuda.is_initialized()
print(*{*sys.modules} - before)
memory = ampkit.debug.memory
from ampkit import debug
assert debug.memory is memory
print(*{*sys.modules} - before)
"""


@pytest.mark.slow
def test_what_an_import_brings_along():
    """All that it adds to torch is ampkit without debug, commands and Lightning, one module of torch, and Python's.

    It touches no CUDA device. `debug` is imported when it is asked for.
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, with_debug = (set(line.split()) for line in done.stdout.splitlines())
    own = {name for name in found if name.partition(".")[0] == "ampkit"}
    assert "ampkit._step.graphed_step" in own
    assert not [name for name in own if name.split(".")[1:2] in (["debug"], ["_commands"], ["lightning"])]
    others = {name for name in found - own if name.partition(".")[0] not in sys.stdlib_module_names}
    others -= {name for name in others if name.startswith("_sysconfigdata_")}  # Python's, named after the machine
    assert others <= {"torch.utils._device"}
    assert {"ampkit.debug", "ampkit.debug._memory.recorder"} <= with_debug


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
