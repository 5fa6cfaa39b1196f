"""Policy: parsing, printing, autocast, and what its errors say."""

import pytest
import torch

from ampkit import Policy

WHOLE = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "float16": (torch.float32, torch.float16, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16, torch.float32),
    "32-true": (torch.float32, torch.float32, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-true": (torch.float16, torch.float16, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_policies(name: str) -> None:
    """Each short name stands for its three dtypes."""
    policy = Policy.parse(name)
    assert (policy.params, policy.compute, policy.output) == WHOLE[name]


@pytest.mark.parametrize("name", [*WHOLE, "compute=bfloat16", " output = float16 , compute = float16 "])
def test_str_is_what_parse_reads(name: str) -> None:
    """parse(str(policy)) == policy, and equal policies have one hash."""
    policy = Policy.parse(name)
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


def test_str_names_every_field() -> None:
    """The printed form is the one that the documentation shows."""
    assert str(Policy.parse("16-mixed")) == "params=float32,compute=float16,output=float32"


def test_is_frozen() -> None:
    """A policy cannot be changed behind the back of whoever holds it."""
    with pytest.raises(AttributeError):
        Policy().compute = torch.float16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fp16", "'fp16' is not a policy"),
        ("", "'' is not a policy"),
        ("params=float32,compute", "'compute' is not a policy"),
        ("compute=float16,dtype=float16", "'dtype' is not a field"),
        ("compute=float16,compute=bfloat16", "'compute' is given twice"),
        ("compute=float8", "Policy(compute='float8')"),
    ],
)
def test_unknown_policy_lists_the_legal_ones(text: str, says: str) -> None:
    """A wrong policy is a ValueError that quotes it and lists what is legal."""
    with pytest.raises(
        ValueError, match=r"16-mixed.*bf16-true.*params=float32,compute=float16,output=float32"
    ) as raised:
        Policy.parse(text)
    assert says in str(raised.value)


def test_parse_wants_a_string() -> None:
    """A dtype instead of its name is answered with what came."""
    with pytest.raises(ValueError, match=r"expected a string, got dtype"):
        Policy.parse(torch.float16)  # type: ignore[arg-type]


def test_float32_compute_over_low_parameters_is_refused() -> None:
    """Autocast only lowers, so such a policy would silently do nothing."""
    with pytest.raises(ValueError, match=r"autocast cannot raise a dtype"):
        Policy(params="bfloat16", compute="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHOLE)
def test_only_float16_compute_needs_scaling(name: str) -> None:
    """bfloat16 has float32's exponents, so its gradients do not underflow."""
    policy = Policy.parse(name)
    assert policy.needs_scaling == (policy.compute is torch.float16)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_autocast_runs_matmul_in_compute(name: str) -> None:
    """Inside the policy's autocast a matrix product has the compute dtype."""
    policy, x = Policy.parse(name), torch.ones(2, 2)
    with policy.autocast("cpu"):
        assert (x @ x).dtype is policy.compute
    assert (x @ x).dtype is torch.float32


def test_autocast_of_float32_shuts_out_the_callers() -> None:
    """A float32 policy means float32, also where the caller is under autocast."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), Policy.parse("float32").autocast("cpu"):
        assert (x @ x).dtype is torch.float32
