"""The arithmetic of compiled updates."""

import pytest
import torch

from ampkit._optimizer.update_code import _bias_correction


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.9999])
def test_bias_corrections_have_all_digits_of_float32(beta: float) -> None:
    """`1 - beta**steps` to 4 units in the last place, from the first step on; by a power, four digits would be left."""
    steps = torch.arange(1, 20_000, dtype=torch.float64)
    exact = 1 - beta**steps
    found = _bias_correction(beta, steps.float())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=4 * 2**-23, atol=0)
