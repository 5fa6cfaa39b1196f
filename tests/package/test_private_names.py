"""The guard around private names of torch: what it says when one is gone. And those of Lightning."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy

from ampkit import lightning
from ampkit._torch.guard import private
from ampkit.lightning._limits import AROUND_STEP, HOOK, PRIVATE_NAMES


def test_a_missing_name_is_an_import_error_that_says_which_torch_to_install():
    """A torch without a private name is refused by the name, with the versions that have it."""
    with pytest.raises(ImportError, match=r"does not support torch .* has no '_no_such_name'\. .* \(2\.11, 2\.15\)"):
        private(torch, "_no_such_name")


def test_a_name_that_is_none_is_there():
    """None is a value: `module.compile()` replaces it."""
    assert private(torch.nn.Module, "_compiled_call_impl") is None


def test_private_names_of_lightning() -> None:
    """Every private name that is used is still there: a change upstream is noticed here, not in training."""
    optimizer = LightningOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    owners = {type(owner).__name__: owner for owner in (DDPStrategy(), LightningModule())}
    owners["LightningOptimizer"] = optimizer
    for name in PRIVATE_NAMES:
        owner, attribute = name.split(".")
        assert hasattr(owners[owner], attribute)
    assert {f"LightningOptimizer.{name}" for name in AROUND_STEP} | {f"LightningModule.{HOOK}"} <= set(PRIVATE_NAMES)
    source = "".join(file.read_text() for file in Path(lightning.__file__).parent.glob("*.py"))
    for name in set(
        re.findall(r"(?:trainer|strategy|pl_module|module|plugin|optimizer|fit_loop)\.(_[a-z]\w*)", source)
    ):
        raise AssertionError(f"ampkit/lightning uses {name}")
