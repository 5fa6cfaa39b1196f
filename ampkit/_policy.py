"""Which dtype parameters, operations and outputs have: one frozen value."""

from dataclasses import dataclass, fields

import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Whole policies by one name: (params, compute, output). The second row of names is Lightning's
# `Trainer(precision=...)`.
_WHOLE = {
    "float32": ("float32", "float32", "float32"),
    "float16": ("float32", "float16", "float32"),
    "bfloat16": ("float32", "bfloat16", "float32"),
    "32-true": ("float32", "float32", "float32"),
    "16-mixed": ("float32", "float16", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "16-true": ("float16", "float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16"),
}


@dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision step. Hashable; `Policy.parse(str(policy)) == policy`.

    Args:
        params: dtype of the parameters, hence of gradients and optimizer state. ampkit checks it, it does not cast.
        compute: dtype that autocast runs matrix multiplications and convolutions in. Where it equals `params`
            autocast is off and every operation runs in its inputs' dtype.
        output: dtype of the floating tensors that a step returns (loss and aux).

    Each is a `torch.dtype` or its name: float32, float16 or bfloat16.

    Raises:
        ValueError: an unknown dtype, or float32 compute over low-precision parameters (autocast only ever lowers).
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    output: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _dtype(field.name, getattr(self, field.name)))
        if self.compute is torch.float32 and self.params is not torch.float32:
            raise ValueError(
                f"Policy(params={_NAMES[self.params]}, compute=float32): autocast cannot raise a dtype. "
                f"Use params=float32, or compute={_NAMES[self.params]}."
            )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Return the policy that `text` names.

        Args:
            text: `params=float32,compute=float16,output=float32` (any of the three may be left out and is float32
                then), one dtype for a float32 model under autocast (`float16`, `bfloat16`, `float32`), or Lightning's
                name (`16-mixed`, `bf16-mixed`, `32-true`, `bf16-true`, `16-true`).

        Raises:
            ValueError: `text` is none of these. The message lists what is legal.
        """
        if not isinstance(text, str):
            raise ValueError(f"Policy.parse({text!r}): expected a string, got {type(text).__name__}.")
        name = text.strip()
        if name in _WHOLE:
            return cls(*(_DTYPES[part] for part in _WHOLE[name]))
        values: dict[str, torch.dtype] = {}
        for part in name.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or key not in _KEYS or key in values:
                raise ValueError(f"Policy.parse({text!r}): {_problem(part, key, equals, values)} {_LEGAL}")
            values[key] = _dtype(key, value)
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{key}={_NAMES[getattr(self, key)]}" for key in _KEYS)

    @property
    def needs_scaling(self) -> bool:
        """True if gradients pass through float16, where those below 2**-24 vanish without a loss scale."""
        return self.compute is torch.float16

    def autocast(self, device_type: str) -> torch.autocast:
        """Return a new context in which operations run in `compute`.

        Args:
            device_type: "cuda", "cpu", as `torch.autocast` takes it.

        A policy without autocast (`compute` equal to `params`) returns a context that switches autocast *off*, so that
        the caller's own autocast does not leak into the step.
        """
        if self.compute is self.params:
            return torch.autocast(device_type, enabled=False)
        return torch.autocast(device_type, dtype=self.compute)


_KEYS = tuple(field.name for field in fields(Policy))
_LEGAL = (
    f"Legal: {', '.join(_WHOLE)}, or a list like 'params=float32,compute=float16,output=float32' "
    f"with the dtypes {', '.join(_DTYPES)}."
)


def _problem(part: str, key: str, equals: str, seen: dict[str, torch.dtype]) -> str:
    if not equals:
        return f"{part.strip()!r} is not a policy."
    if key in seen:
        return f"{key!r} is given twice."
    return f"{key!r} is not a field of Policy."


def _dtype(field: str, value: object) -> torch.dtype:
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _NAMES:
        raise ValueError(f"Policy({field}={value!r}): expected one of {', '.join(_DTYPES)}. {_LEGAL}")
    return dtype
