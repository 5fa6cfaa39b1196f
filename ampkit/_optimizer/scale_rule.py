"""What the numbers of a loss scale may be: checked all together, before any of them is taken over."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream

from .._arguments import check_instance, real_number, shown, wrong

SMALLEST = torch.finfo(torch.float32).tiny  # 2**-126; of a smaller scale, 1 / scale is infinite or nearly so
_LARGEST = torch.finfo(torch.float32).max


class _Kind(NamedTuple):
    """What a number may be: how it is read (None if it may not be so), and how that is told."""

    read: Callable[[Any], Any]
    words: str


def _real(value: Any) -> float | None:
    """Return a number, or the one element of a tensor, as a float; None of anything else, and of nan."""
    if isinstance(value, Tensor):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # several elements, or none that can be read
            return None
    number = real_number(value)
    return None if number is None or math.isnan(number) else number


def _between(low: float, high: float, words: str) -> _Kind:
    def read(value: Any) -> float | None:
        number = _real(value)
        return number if number is not None and low <= number <= high else None

    return _Kind(read, words)


def _count(least: int, most: int, words: str) -> _Kind:
    def read(value: Any) -> int | None:
        number = _real(value)
        if number is None or not number.is_integer() or not least <= number <= most:
            return None
        return int(value)

    return _Kind(read, words)


_SCALE = _between(SMALLEST, _LARGEST, f"a number from {SMALLEST:.3g} to {_LARGEST:.3g}, which float32 holds")
_GROWTH = _between(1.0, _LARGEST, "a finite number of at least 1")
_BACKOFF = _between(math.ulp(0.0), 1.0, "a number above 0 and at most 1")
_LOW = _between(math.ulp(0.0), _LARGEST, "a finite number above 0, or None")
_HIGH = _between(SMALLEST, math.inf, f"a number of at least {SMALLEST:.3g}, or None")
_INTERVAL = _count(1, 2**62, "an int of at least 1")
_STEPS = _count(0, 2**53, "an int of at least 0")
_TRACKER = _count(0, 2**31 - 1, "an int of at least 0")
_PATIENCE = _count(-(2**31), 2**31 - 1, "an int")
_FLAG = _Kind(lambda value: value if isinstance(value, bool) else None, "True or False")

_OF_TORCH = {
    "scale": _SCALE,
    "growth_factor": _GROWTH,
    "backoff_factor": _BACKOFF,
    "growth_interval": _INTERVAL,
    "_growth_tracker": _TRACKER,
}
_OWN = {
    "hysteresis": _count(1, 2**31 - 1, "an int of at least 1"),
    "min_scale": _LOW,
    "max_scale": _HIGH,
    "dynamic": _FLAG,
    "steps": _STEPS,
    "skipped": _STEPS,
    "_patience": _PATIENCE,
}
_MAY_BE_NONE = ("min_scale", "max_scale")


def read_number(where: str, name: str, value: Any, *, argument: str | None = None) -> Any:
    """Return an entry of a state dict as a plain number.

    Args:
        where: the public function, for the message.
        name: the entry.
        value: what it is said to be.
        argument: what the message calls it; None is the entry's name.

    Raises:
        ValueError: no such number is possible. The message quotes name and value.
    """
    if value is None and name in _MAY_BE_NONE:
        return None
    return _read(_OF_TORCH.get(name) or _OWN[name], where, argument or name, value)


def _read(kind: _Kind, where: str, name: str, value: Any) -> Any:
    read = kind.read(value)
    if read is None:
        raise wrong(where, name, value, kind.words)
    return read


def read_state(state_dict: Any, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state dict says, in plain numbers, completed by the rule that is in force.

    Args:
        state_dict: of torch's scaler or ours.
        rule: `GradScaler.rule()` of the scaler that is to take it.

    Raises:
        ValueError: an entry is missing or impossible. The message names it.
        RuntimeError: it is empty, as that of a disabled scaler.
    """
    where = "GradScaler.load_state_dict"
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{where}({type(state_dict).__name__}): expected the dict that state_dict() returned.")
    if not state_dict:
        raise RuntimeError(f"{where}({{}}): the state dict is empty, as that of a disabled scaler. Load another one.")
    missing = [name for name in _OF_TORCH if name not in state_dict]
    if missing:
        raise ValueError(f"{where}: the key {missing[0]!r} is missing; found {shown([*state_dict])}.")
    own = {name: state_dict[name] for name in _OWN if name in state_dict}
    given = {**{name: state_dict[name] for name in _OF_TORCH}, **own}
    new = {name: read_number(where, name, value) for name, value in given.items()}
    complete = {**rule, "steps": 0, "skipped": 0, **new}
    check_limits(where, complete["min_scale"], complete["max_scale"])
    return {"_patience": complete["hysteresis"], **complete}


def check_limits(where: str, low: Any, high: Any) -> None:
    """Raise a `ValueError` unless both are limits, or None, and some scale is within them."""
    least, most = (SMALLEST if low is None else _LOW.read(low)), (_LARGEST if high is None else _HIGH.read(high))
    if least is None or most is None or least > most:
        given = f"min_scale={shown(low)}, max_scale={shown(high)}"
        raise ValueError(f"{where}({given}): expected 0 < min_scale <= max_scale.")


_ARGUMENTS = {
    "init_scale": _SCALE,
    # torch refuses 1 for either, where the scale would not move. A setter and a state dict may say so.
    "growth_factor": _between(math.nextafter(1.0, 2.0), _LARGEST, "a finite number above 1"),
    "backoff_factor": _between(math.ulp(0.0), math.nextafter(1.0, 0.0), "a number above 0 and below 1"),
    "growth_interval": _INTERVAL,
}


def read_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `torch.amp.GradScaler` by name, in plain numbers.

    Raises:
        ValueError: an argument makes no scale. The message names it.
        TypeError: torch has no such argument.
    """
    given = inspect.signature(upstream.GradScaler).bind(*args, **kwargs).arguments
    check_instance("GradScaler", "device", given.get("device", "cuda"), (str, torch.device), "a string such as 'cuda'")
    try:
        given["enabled"] = bool(given.get("enabled", True))
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array of several elements
        raise wrong("GradScaler", "enabled", given["enabled"], "True or False") from None
    for argument, kind in _ARGUMENTS.items() if given["enabled"] else ():
        if argument in given:
            given[argument] = _read(kind, "GradScaler", argument, given[argument])
    return given
