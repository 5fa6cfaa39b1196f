"""The dtypes that a policy can name, and the names that stand for them."""

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Tensors of these dtypes are cast by rules; others, such as integers and float64, are left alone.
CASTABLE = tuple(DTYPES.values())
# What other libraries call them.
_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}


def canonical_name(name: str) -> str:
    """Return torch's name for a dtype that is written in another way, as "bfloat16" for "BF16" or "torch.bfloat16".

    Names that stand for no dtype are returned in lower case.
    """
    name = name.strip().lower().removeprefix("torch.")
    return _ALIASES.get(name, name)


def as_dtype(value: object) -> torch.dtype | None:
    """Return the dtype of `DTYPES` that a `torch.dtype` or a name stands for, None if it stands for none."""
    dtype = DTYPES.get(canonical_name(value)) if isinstance(value, str) else value
    return dtype if isinstance(dtype, torch.dtype) and dtype in CASTABLE else None
