"""How a private name of torch is taken: with an error that names the versions ampkit was checked on."""

from typing import Any

import torch

_MISSING = object()


def private(owner: object, name: str) -> Any:
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        raise ImportError(
            f"ampkit does not support torch {torch.__version__}: {owner!r} has no {name!r}. "
            "Install a torch that ampkit was checked on (2.11, 2.15), or a newer ampkit."
        )
    return found
