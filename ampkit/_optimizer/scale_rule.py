"""The numbers of a loss scale: which ones are possible, checked before any of them is used, and how they bound it."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream
from torch.nn.parameter import is_lazy

from .._arguments import check_instance, real_number, shown, wrong

SMALLEST = torch.finfo(torch.float32).tiny  # 2**-126; the reciprocal of a smaller scale is infinite or nearly so
_LARGEST = torch.finfo(torch.float32).max


class ScaleLimits(NamedTuple):
    """The part of the rule that torch's scaler does not have. `GradScaler` explains the numbers."""

    hysteresis: int
    min_scale: float | None
    max_scale: float | None
    dynamic: bool

    @property
    def is_torchs_rule(self) -> bool:
        """Whether these limits leave the scale to torch's rule, above its smallest value."""
        return self == (1, None, None, True)

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest scale, as numbers that float32 holds."""
        low = SMALLEST if self.min_scale is None else max(self.min_scale, SMALLEST)
        # A number may be larger than the largest of float32 and yet round to it. torch refuses such a bound.
        return low, math.inf if self.max_scale is None else min(self.max_scale, _LARGEST)

    def apply_(self, scale: Tensor, before: Tensor, patience: Tensor, overflow: Tensor, grew: Tensor) -> None:
        """Take back what torch's rule did to the scale, which was `before`, and what these limits forbid. Sync: none.

        `patience` is how many overflows the hysteresis still allows. It and the scale are changed in place.
        """
        patience.sub_(overflow.int())  # may fall below 0: only its sign counts
        scale.copy_(torch.where(overflow & (patience > 0), before, scale))
        patience.copy_(torch.where(grew, self.hysteresis, patience))
        scale.clamp_(*self.bounds()) if self.dynamic else scale.copy_(before)


class _NumberKind(NamedTuple):
    """What a number may be: a function that returns it as a plain number, None if it is not allowed; and words."""

    read: Callable[[Any], Any]
    words: str


def _between(low: float, high: float, words: str, *, whole: bool = False) -> _NumberKind:
    def read(value: Any) -> float | None:
        if isinstance(value, Tensor):
            try:
                value = value.item()
            except (RuntimeError, ValueError):  # several elements, or none that can be read
                return None
        number = real_number(value)
        if number is None or not low <= number <= high or (whole and not number.is_integer()):  # nan is not between
            return None
        return int(value) if whole else number

    return _NumberKind(read, words)


_SCALE = _between(SMALLEST, _LARGEST, f"a number from {SMALLEST:.3g} to {_LARGEST:.3g}, which float32 holds")
_LOW = _between(math.ulp(0.0), _LARGEST, "a finite number above 0, or None")
_HIGH = _between(SMALLEST, math.inf, f"a number of at least {SMALLEST:.3g}, or None")
_INTERVAL = _between(1, 2**62, "an int of at least 1", whole=True)
_STEPS = _between(0, 2**53, "an int of at least 0", whole=True)

_TORCHS_ENTRIES = {
    "scale": _SCALE,
    "growth_factor": _between(1.0, _LARGEST, "a finite number of at least 1"),
    "backoff_factor": _between(math.ulp(0.0), 1.0, "a number above 0 and at most 1"),
    "growth_interval": _INTERVAL,
    "_growth_tracker": _between(0, 2**31 - 1, "an int of at least 0", whole=True),
}
_OUR_ENTRIES = {
    "hysteresis": _between(1, 2**31 - 1, "an int of at least 1", whole=True),
    "min_scale": _LOW,
    "max_scale": _HIGH,
    "dynamic": _NumberKind(lambda value: value if isinstance(value, bool) else None, "True or False"),
    "steps": _STEPS,
    "skipped": _STEPS,
    "_patience": _between(-(2**31), 2**31 - 1, "an int", whole=True),
}
_MAY_BE_NONE = ("min_scale", "max_scale")
_ARGUMENTS = {
    "init_scale": _SCALE,
    # torch's constructor refuses 1 for these two factors. A setter and a state dict may set 1, to keep the scale.
    "growth_factor": _between(math.nextafter(1.0, 2.0), _LARGEST, "a finite number above 1"),
    "backoff_factor": _between(math.ulp(0.0), math.nextafter(1.0, 0.0), "a number above 0 and below 1"),
    "growth_interval": _INTERVAL,
}


def read_number(where: str, name: str, value: Any, *, argument: str | None = None) -> Any:
    """Return an entry of a state dict as a plain number, or raise. The message calls it `argument`, if it has one."""
    if value is None and name in _MAY_BE_NONE:
        return None
    return _read(_TORCHS_ENTRIES.get(name) or _OUR_ENTRIES[name], where, argument or name, value)


def read_new_scale(new: Any, device_type: str | None) -> Any:
    """Return the argument of `GradScaler.update`: a number as a plain number, and None or a tensor as it is."""
    if new is None:
        return None
    if not isinstance(new, Tensor):
        return read_number("GradScaler.update", "scale", new, argument="new_scale")
    is_one = not is_lazy(new) and new.numel() == 1 and new.layout is torch.strided and not new.is_complex()
    if not is_one or new.device.type != device_type or new.requires_grad:
        expected = f"a number above 0, or a tensor of one element on {device_type} without grad"
        raise wrong("GradScaler.update", "new_scale", new, expected)
    return new


def _read(kind: _NumberKind, where: str, name: str, value: Any) -> Any:
    read = kind.read(value)
    if read is None:
        raise wrong(where, name, value, kind.words)
    return read


def read_state(state_dict: Any, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict as plain numbers. The present rule stands in for entries that are missing.

    Raises:
        ValueError: an entry of torch's is missing, or an entry has an impossible value. The message names it.
        RuntimeError: it is empty, as that of a disabled scaler.
    """
    where = "GradScaler.load_state_dict"
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{where}({type(state_dict).__name__}): expected the dict that state_dict() returned.")
    if not state_dict:
        raise RuntimeError(f"{where}({{}}): the state dict is empty, as that of a disabled scaler. Load another one.")
    missing = [name for name in _TORCHS_ENTRIES if name not in state_dict]
    if missing:
        raise ValueError(f"{where}: the key {missing[0]!r} is missing; found {shown([*state_dict])}.")
    names = [*_TORCHS_ENTRIES, *(name for name in _OUR_ENTRIES if name in state_dict)]
    new = {name: read_number(where, name, state_dict[name]) for name in names}
    complete = {**rule, "steps": 0, "skipped": 0, **new}
    _check_limits(where, complete["min_scale"], complete["max_scale"])
    return {"_patience": complete["hysteresis"], **complete}


def read_limits(given: ScaleLimits, init_scale: float) -> ScaleLimits:
    """Return the arguments of `GradScaler` that torch's scaler does not have, as plain numbers, or raise."""
    _check_limits("GradScaler", given.min_scale, given.max_scale)
    limits = ScaleLimits(**{name: read_number("GradScaler", name, value) for name, value in given._asdict().items()})
    low, high = limits.bounds()
    if not low <= init_scale <= high:
        raise ValueError(
            f"GradScaler(init_scale={init_scale!r}): it lies outside min_scale={limits.min_scale!r} and "
            f"max_scale={limits.max_scale!r}."
        )
    return limits


def _check_limits(where: str, low: Any, high: Any) -> None:
    """Raise a `ValueError` unless both are limits, or None, and some scale is within them."""
    least, most = (SMALLEST if low is None else _LOW.read(low)), (_LARGEST if high is None else _HIGH.read(high))
    if least is None or most is None or least > most:
        given = f"min_scale={shown(low)}, max_scale={shown(high)}"
        raise ValueError(f"{where}({given}): expected 0 < min_scale <= max_scale.")


def read_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `torch.amp.GradScaler` by name, numbers as plain numbers, or raise."""
    given = inspect.signature(upstream.GradScaler).bind(*args, **kwargs).arguments
    device = given.get("device", "cuda")
    check_instance("GradScaler", "device", device, (str, torch.device), "a string such as 'cuda'")
    try:
        torch.device(device)
    except RuntimeError:  # of a name that torch does not know; its scaler would keep it
        raise wrong("GradScaler", "device", device, "the type of a device that torch has: 'cuda' or 'cpu'") from None
    try:
        given["enabled"] = bool(given.get("enabled", True))
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array of several elements
        raise wrong("GradScaler", "enabled", given["enabled"], "True or False") from None
    for argument, kind in _ARGUMENTS.items() if given["enabled"] else ():
        if argument in given:
            given[argument] = _read(kind, "GradScaler", argument, given[argument])
    return given
