"""What the arguments of public functions may be, and the error that names function, argument and value."""

import functools
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch.amp.autocast_mode import is_autocast_available

P = ParamSpec("P")
R = TypeVar("R")
_LONGEST = 200  # characters of a value that a message quotes


def shown(value: object) -> str:
    """Return a value as a message quotes it: its repr, shortened in the middle, or its type if it has no repr."""
    try:
        text = repr(value)
    except Exception:  # of a class of the user's, whose mistake is another one than the argument
        return f"<{type(value).__name__}>"
    return shortened(text)


def shortened(text: str) -> str:
    """Return a text of the user's as a message quotes it."""
    cut = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:cut]}...{text[-cut:]}"


def wrong(where: str, name: str, value: object, expected: str) -> ValueError:
    """Return the error that says what an argument of the public function `where` should have been."""
    return ValueError(f"{where}({name}={shown(value)}): expected {expected}.")


def named_here(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function: `names` says what arguments that other libraries have are called here.

    The function raises a `ValueError` with what to write if it gets one of them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in names.keys() & kwargs.keys():
                value = kwargs[name]
                text = shown(str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value)
                raise ValueError(
                    f"{function.__name__}({name}={text}): there is no argument {name!r}. Write {names[name]}={text}."
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def check_instance(where: str, name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise a `ValueError`, with the type of the value, unless it is an object of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{where}({name}={type(value).__name__}): expected {expected}.")


def uninitialized(where: str, path: str) -> ValueError:
    """Return the error of a public function for a parameter, or buffer, that a lazy module is still to make."""
    return ValueError(
        f"{where}: {path} has no shape yet, because a lazy module makes it when it is first called. Call the model "
        "once with a batch before: with torch.no_grad(): model(batch)."
    )


def check_callable(where: str, name: str, value: object, expected: str) -> None:
    """Raise a `ValueError` unless the value can be called."""
    if not callable(value):
        raise wrong(where, name, value, expected)


def check_choice(where: str, name: str, value: object, legal: Iterable[str]) -> None:
    """Raise a `ValueError` unless the value is one of these strings."""
    if not (isinstance(value, str) and value in legal):
        raise wrong(where, name, value, f"one of {', '.join(map(repr, legal))}")


def check_flag(where: str, name: str, value: object) -> None:
    """Raise a `ValueError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise wrong(where, name, value, "True or False")


def check_at_least(where: str, name: str, value: object, least: int, why: str) -> None:
    """Raise a `ValueError` unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(where, name, value, f"an int of at least {least}; {why}")


def read_positive(where: str, name: str, value: Any, otherwise: str) -> Any:
    """Return a number above 0 (inf included) as an int or float of Python.

    Raises:
        ValueError: it is none.
    """
    number = real_number(value)
    if number is None or not number > 0:
        raise ValueError(f"{where}({name}={shown(value)}): must be a number > 0, or {otherwise}.")
    return value if type(value) is int and value < 2**63 else number  # of which torch takes none that are larger


def read_max_norm(where: str, value: Any) -> Any:
    """Return a norm to clip to, None for no clipping. Raise a `ValueError` if it is neither."""
    return None if value is None else read_positive(where, "max_norm", value, "None to disable clipping")


def real_number(value: object) -> float | None:
    """Return a real number as a float; None of anything else, and of an int beyond what a float holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def read_all(where: str, name: str, values: Any, kind: type, expected: str) -> tuple[Any, ...]:
    """Return the values as a tuple.

    Raises:
        ValueError: they are no objects of this class in a tuple, list or another iterable.
    """
    if isinstance(values, kind):
        instead = f"Write {name}=({name.removesuffix('s')},)."
        raise ValueError(f"{where}({name}={type(values).__name__}): expected {expected}. {instead}")
    read = listed(values)
    if read is None:
        raise wrong(where, name, values, expected)
    for i, value in enumerate(read):
        if not isinstance(value, kind):
            raise wrong(where, f"{name}[{i}]", value, expected)
    return tuple(read)


def listed(values: Any) -> list[Any] | None:
    """Return what an iterable yields; None of text, of a tensor, and of what cannot be iterated over."""
    if isinstance(values, (str, bytes, torch.Tensor)):
        return None
    try:
        return list(values)
    except TypeError:
        return None


def check_device_type(where: str, value: object, otherwise: str = "") -> None:
    """Raise a `ValueError` unless the value names a type of device that has autocast."""
    try:
        known = isinstance(value, str) and is_autocast_available(value)
    except RuntimeError:  # torch knows no device of this name
        known = False
    if not known:
        expected = f"the type of a device that has autocast, as 'cuda' or 'cpu'{otherwise}"
        raise wrong(where, "device_type", value, expected)


def check_path(where: str, name: str, value: object) -> None:
    """Raise a `ValueError` unless the value can be the name of a file or folder."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise wrong(where, name, value, "a path, as a string or a pathlib.Path")


def read_device(where: str, name: str, value: Any) -> torch.device:
    """Return the device that a string, an index or a `torch.device` stands for.

    Raises:
        ValueError: it stands for none.
    """
    expected = "a torch.device, or text such as 'cuda', 'cuda:1', 'cpu'"
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise wrong(where, name, value, expected) from error
    if isinstance(value, int) and device.index != value:  # torch keeps the index in 8 bits
        raise wrong(where, name, value, expected)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{where}({name}={shown(value)}): no CUDA device is available. Pass 'cpu'.")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise wrong(where, name, value, f"one of the {torch.cuda.device_count()} CUDA devices")
    return device
