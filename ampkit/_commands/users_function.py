"""Imports the function that `module:function` or `file.py:function` names, and says why if a command cannot call it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .._errors import UsageError
from .._text import type_text
from .._user_line import users_traceback

CALL = "module:function"  # how the help calls it
_HOW = (
    "Write module:function or file.py:function: train:example and train.py:example are the function `example` of "
    "train.py in this folder."
)


def users_function(text: str, returned: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function that `module:function`, or `file.py:function`, names.

    A file is imported as `import` would if its folder were the first of `sys.path`, which it is from then on.

    `returned` and `arguments` say, in words for messages, what it must return and what it gets. It may take fewer.

    Raises:
        UsageError: if there is no such function, or it needs other arguments.
        Exception: what the user's module raises when it is imported. If that module imports a missing one, this is an
            ImportError whose traceback has the user's line, not a UsageError.
    """
    path, _, name = text.rpartition(":")
    is_file = path.endswith(".py")
    if not name.isidentifier() or not (is_file or all(part.isidentifier() for part in path.split("."))):
        raise UsageError(f"{text!r}: expected module:function. {_HOW}")
    if is_file and not Path(path).is_file():
        raise UsageError(f"{text!r}: there is no file {path!r}. {_HOW}")
    try:
        module = _module_of(Path(path).resolve()) if is_file else importlib.import_module(path)
    except ImportError as error:
        if users_traceback(error):
            raise
        raise UsageError(f"{text!r}: {error}. {_HOW}") from None
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        has = f" It has {', '.join(own)}." if own else ""
        raise UsageError(f"{text!r}: {'file' if is_file else 'module'} {path!r} has no attribute {name!r}.{has}")
    function = getattr(module, name)
    if not callable(function):
        raise UsageError(f"{text!r} is {type_text(function)}, expected a function that returns {returned}.")
    if not any(takes(function, count) for count in range(len(arguments) + 1)):
        legal = " or ".join([*(f"with {argument}" for argument in arguments), "without arguments"])
        raise UsageError(f"{text!r} cannot be called {legal}, as it must be. It must return {returned}.")
    return function  # type: ignore[no-any-return]  # the user's function


def _module_of(file: Path) -> ModuleType:
    """Import a file. Its module has the name of the file, unless another module has that name already."""
    known = sys.modules.get(file.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    name = file.stem if known is None else f"{file.stem}_of_{abs(hash(file))}"
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # of a name that ends with .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this number of positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        return False
    return True
