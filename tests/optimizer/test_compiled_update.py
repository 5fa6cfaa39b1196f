"""Compiled updates: their arithmetic, and the code that Inductor writes for them on a GPU."""

from collections.abc import Iterable

import gpu_code
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import ampkit
from ampkit._commands.bench.cases import CASES
from ampkit._optimizer.param_groups import CapturableGroups
from ampkit._optimizer.update.compiled_update import CompiledUpdate
from ampkit._optimizer.update.state_form import StateForm, set_state_form
from ampkit._optimizer.update.update_code import _bias_correction
from ampkit._step.compile.compiled import INDUCTOR_OPTIONS
from ampkit._torch.compile import Compiler

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def kernels_of_update(
    monkeypatch: pytest.MonkeyPatch,
    like: Iterable[Tensor],
    *,
    is_sgd: bool = False,
    compile: str = "default",
    form: StateForm | None = None,
) -> int:
    """Return how many kernels the update of such parameters has. It clips; gradients are bfloat16 but for biases."""
    device = torch.device("cuda", 0)
    with gpu_code.h200(monkeypatch):
        dtype = torch.bfloat16 if form is not None and form.rounding is not None else torch.float32
        params = [torch.empty_strided(p.shape, p.stride(), dtype=dtype, device=device).requires_grad_() for p in like]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = SGD(params, lr=0.1, momentum=0.9) if is_sgd else AdamW(params, fused=True)
        for param in params:
            names = (form or StateForm()).names(optimizer.param_groups[0], param)
            low = torch.bfloat16 if form is not None else param.dtype
            optimizer.state[param] = {name: torch.empty_like(param, dtype=low) for name in names}
            optimizer.state[param] |= {} if is_sgd else {"step": torch.empty((), device=device)}
        set_state_form(optimizer, form)
        scaler, groups = ampkit.GradScaler("cuda", enabled=False), CapturableGroups(optimizer, device)
        groups.refresh()
        update = CompiledUpdate(optimizer, scaler, groups, 1.0, Compiler(INDUCTOR_OPTIONS[compile]))
        prepared = update.prepared({param: param.bfloat16() for param in params if param.dim() > 1})
        assert prepared is not None
        return len(gpu_code.kernels(monkeypatch, lambda: update.run(prepared)))


@pytest.mark.parametrize("compile", ["default", pytest.param("max", marks=pytest.mark.seeds)])
@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_convolutions_in_channels_last(optimizer: str, compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes code for them: in torch 2.11 it fails with SGD where it may reorder loops."""
    shapes = [(64, 3, 3, 3), (64,), (512, 256, 3, 3), (512,), (512, 512, 3, 3), (512,), (512, 256, 1, 1), (512,)]
    like = [torch.empty(shape) for shape in shapes]
    like = [tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor for tensor in like]
    assert kernels_of_update(monkeypatch, like, is_sgd=optimizer == "SGD", compile=compile) <= len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("form", [StateForm(True), StateForm(True, "stochastic"), StateForm(True, "kahan")])
def test_states_in_bfloat16_take_no_more_kernels(form: StateForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widening, arithmetic and rounding are one kernel; random numbers may take one more, for their seeds."""
    like = [torch.empty(shape) for shape in [(256, 64), (256,), (64, 256), (64,)]]
    plain = kernels_of_update(monkeypatch, like)
    torch._dynamo.reset()
    assert kernels_of_update(monkeypatch, like, form=form) <= plain + (form.rounding == "stochastic")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18-cifar", "vit_b_16"])
@pytest.mark.seeds
def test_models_of_the_bench(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update has fewer kernels than the model has parameters."""
    case = CASES[name](1, seed=0, count=1)
    like = [param.detach() for param in case.model.parameters()]
    is_sgd = isinstance(case.optimizer(case.model.parameters()), SGD)
    assert kernels_of_update(monkeypatch, like, is_sgd=is_sgd, compile="default") <= len(like)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.9999])
def test_bias_corrections_have_all_digits_of_float32(beta: float) -> None:
    """`1 - beta**steps` to 4 units in the last place, from the first step on; by a power, four digits would be left."""
    steps = torch.arange(1, 20_000, dtype=torch.float64)
    exact = 1 - beta**steps
    found = _bias_correction(beta, steps.float())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=4 * 2**-23, atol=0)
