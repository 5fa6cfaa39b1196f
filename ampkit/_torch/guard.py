"""How a private name of torch is taken: a torch without it raises an error that names the versions to install."""

from typing import Any

import torch

_MISSING = object()


def private(owner: object, name: str) -> Any:
    """Return `owner.name`, where `name` is private to torch. Raises ImportError if this torch has no such name.

    Names that every use needs are taken when ampkit is imported, so that the error comes then.
    """
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        raise ImportError(
            f"ampkit does not support torch {torch.__version__}: {owner!r} has no {name!r}. "
            "Install a torch that ampkit was checked on (2.11, 2.15), or a newer ampkit."
        )
    return found
