"""Linear layers in float8 by torchao. This file alone imports it: its module swap is to go (pytorch/ao#4325)."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import AmpkitWarning
from .._text import error_line
from .._torch.tensors.modes import without_torch_function
from .._user_line import users_level

# What torchao calls each recipe.
RECIPES = {
    "float8_tensorwise": "tensorwise",
    "float8_rowwise": "rowwise",
    "float8_rowwise_with_gw_hp": "rowwise_with_gw_hp",
}
IF_FASTER = "_if_faster"  # at the end of a rule: the layers that gain by it are chosen
MULTIPLE = 16  # all sizes of a float8 product, which torch._scaled_mm wants
_CAPABILITY = (8, 9)  # Ada and Hopper, the first with float8 tensor cores

Float8Forward = Callable[[nn.Linear, Tensor], Tensor]
# Gets the recipe, the layer, the input as it is cast, and the output without the bias, whose gradient is cast.
Float8Watch = Callable[[str, nn.Linear, Tensor, Tensor], None]
_WATCHES: list[Float8Watch] = []


def as_float8(value: object) -> str | None:
    """Return the whole name of the float8 rule that `value` names, None if it names none."""
    if not isinstance(value, str):
        return None
    name = value.strip().lower()
    recipe = name.removesuffix(IF_FASTER)
    recipe = "float8_tensorwise" if recipe == "float8" else recipe
    return recipe + name[len(name.removesuffix(IF_FASTER)) :] if recipe in RECIPES else None


def chooses(rule: object) -> bool:
    """Return whether a rule leaves it to timing which layers compute in float8."""
    return isinstance(rule, str) and rule.endswith(IF_FASTER)


def why_not_on(device: torch.device) -> str:
    """Return why this device computes nothing in float8, "" if it does. The CPU emulates it."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and float8 "
            f"needs {_CAPABILITY[0]}.{_CAPABILITY[1]} or more"
        )
    return "" if device.type in ("cuda", "cpu", "meta") else f"there is no float8 on {device.type}"


@functools.cache
def float8_forward(recipe: str) -> Float8Forward:
    """Return the forward of a Linear layer that computes in float8, in training mode.

    The weight is cast from the dtype that it has, and the products have the dtype of the input. In evaluation mode, and
    with a number of rows that is no multiple of 16, the layer computes as without float8.

    Raises:
        ImportError: there is no torchao, or one that is too old.
    """
    try:
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ImportError(f"{recipe} needs torchao 0.18 ({error_line(error)}): pip install 'ampkit[float8]'") from error
    matmul: Callable[..., Tensor] = matmul_with_hp_or_float8_args.apply
    configs: dict[bool, tuple[Any, Any]] = {}  # by whether it is emulated
    for emulate in (False, True):
        config = replace(_config(recipe), emulate=emulate)
        layer: Any = Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config)
        configs[emulate] = layer.linear_mm_config, config
    # Of a model without layers it changes nothing, but it works around what Triton miscompiles (its issue 11111).
    convert_to_float8_training(nn.Sequential(), config=configs[False][1])
    hardware, emulated = configs[False], configs[True]

    def forward(module: nn.Linear, input: Tensor) -> Tensor:
        if not module.training or not has_fitting_rows(input):
            return nn.Linear.forward(module, input)
        with without_torch_function():  # a policy's rules for operations are for those that the user calls
            out = matmul(input, module.weight.t(), *(hardware if input.is_cuda else emulated))
            for watch in () if torch.compiler.is_compiling() else _WATCHES:
                watch(recipe, module, input, out)
            return out if module.bias is None else out + module.bias.to(out.dtype)

    return forward


@contextmanager
def watching_float8(watch: Float8Watch) -> Iterator[None]:
    """Context in which a function is called behind each product that makes an output in float8, except compiled ones.

    It may measure the tensors that it gets, and put hooks on the output.
    """
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES[:] = [each for each in _WATCHES if each is not watch]


def count_float8(recipe: str, what: str, tensor: Tensor) -> Tensor:
    """Return how many values of a tensor the casts of a recipe to float8 lose.

    A tensor is read by two products, and the recipe may scale it for each in another way. A value counts if it is lost
    for one of them.

    Args:
        recipe: one of `RECIPES`.
        what: what the tensor is in its layer: "input", "weight" or "grad_output".
        tensor: as the layer casts it.

    Returns:
        How many values there are, how many of them become zero though they are not, and how many are beyond the largest
        number of the format and become that: int64, shape (3,). Sync: none. Memory: up to 16 bytes per element.
    """
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    config, rows = _config(recipe), tensor.reshape(-1, tensor.shape[-1])
    flushed = saturated = torch.zeros((), dtype=torch.bool, device=tensor.device)
    other = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}[what]
    casts = getattr(config, f"cast_config_{what}"), getattr(config, f"cast_config_{what}_for_{other}")
    is_tensorwise = [cast.scaling_granularity is type(cast.scaling_granularity).TENSORWISE for cast in casts]
    for cast, dim in zip(casts, (-1, 0), strict=True):
        if cast.scaling_type is type(cast.scaling_type).DISABLED or (dim == 0 and all(is_tensorwise)):
            continue  # it stays as it is, or it is the same cast
        scale = tensor_to_scale(
            rows,
            cast.target_dtype,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=dim,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        scaled, info = rows.float() * scale, torch.finfo(cast.target_dtype)
        half = 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2  # of the distance to a number beyond the largest
        flushed = flushed | ((rows != 0) & (to_fp8_saturated(scaled, cast.target_dtype).float() == 0))
        saturated = saturated | (scaled.abs() >= info.max + half)
    count = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    return torch.stack([count, flushed.sum(), saturated.sum()])


def _config(recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig.from_recipe_name(RECIPES[recipe])


def rows_of(input: Tensor) -> int:
    """Return the product of the leading dimensions."""
    return input.numel() // max(1, input.shape[-1])


def has_fitting_rows(input: Tensor) -> bool:
    """Return whether an input has as many rows as float8 takes. Warn if it has not, except in compiled code."""
    rows = rows_of(input)
    fits = rows > 0 and rows % MULTIPLE == 0 and not input.is_nested
    if not fits and not torch.compiler.is_compiling():
        warnings.warn(
            f"a Linear layer with {input.shape[-1]} inputs has a float8 rule, and got {rows} rows. It computes such a "
            f"batch without float8, which takes multiples of {MULTIPLE}.",
            AmpkitWarning,
            stacklevel=users_level(),
        )
    return fits
