"""The guard around private names of torch: what it says when one is gone."""

import pytest
import torch

from ampkit._torch.guard import private


def test_a_missing_name_is_an_import_error_that_says_which_torch_to_install():
    """A torch without a private name is refused by the name, with the versions that have it."""
    with pytest.raises(ImportError, match=r"does not support torch .* has no '_no_such_name'\. .* \(2\.11, 2\.15\)"):
        private(torch, "_no_such_name")


def test_a_name_that_is_none_is_there():
    """None is a value: `module.compile()` replaces it."""
    assert private(torch.nn.Module, "_compiled_call_impl") is None
