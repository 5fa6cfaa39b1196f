"""Imports the function that `module:function` names, and says what is wrong if the command cannot call it."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .._errors import UsageError
from .._text import type_text
from .._user_line import users_traceback

_HOW = "Write module:function: train:example is the function `example` of train.py in this folder."


def users_function(text: str, returned: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function that `module:function` names.

    `returned` and `arguments` say, in words for messages, what it must return and what it gets. It may take fewer.

    Raises:
        UsageError: if there is no such function, or it needs other arguments.
        Exception: what the user's module raises when it is imported. If that module imports a missing one, this is an
            ImportError whose traceback has the user's line, not a UsageError.
    """
    path, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in path.split(".")):
        raise UsageError(f"{text!r}: expected module:function. {_HOW}")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        if users_traceback(error):
            raise
        raise UsageError(f"{text!r}: {error}. {_HOW}") from None
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == path]
        has = f" It has {', '.join(own)}." if own else ""
        raise UsageError(f"{text!r}: module {path!r} has no attribute {name!r}.{has}")
    function = getattr(module, name)
    if not callable(function):
        raise UsageError(f"{text!r} is {type_text(function)}, expected a function that returns {returned}.")
    if not any(takes(function, count) for count in range(len(arguments) + 1)):
        legal = " or ".join([*(f"with {argument}" for argument in arguments), "without arguments"])
        raise UsageError(f"{text!r} cannot be called {legal}, as it must be. It must return {returned}.")
    return function  # type: ignore[no-any-return]  # the user's function


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this number of positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        return False
    return True
