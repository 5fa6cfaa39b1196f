"""The public surface is frozen: adding a name means editing the list on purpose."""

import inspect

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
    public = {name for name in vars(ampkit) if not name.startswith("_")}
    assert sorted(ampkit.__all__) == PUBLIC_NAMES
    assert public - {"lightning"} == set(ampkit.__all__)  # lightning is imported on demand


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
