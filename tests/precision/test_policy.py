"""Policy: parsing, printing, autocast, and what its errors say."""

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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
        ("fp8", "'fp8' is not a policy"),
        ("", "'' is not a policy"),
        ("params=float32,compute", "'compute' is not a policy"),
        ("compute=float16,dtype=float16", "'dtype' is not a field"),
        ("compute=float16,compute=bfloat16", "'compute' is given twice"),
        ("compute=float4", "Policy(compute='float4')"),
        ("float16,compute=bfloat16", "'compute' is given twice"),
        ("float16,bfloat16", "'bfloat16' is not a policy"),
        ("ops={softmax:float32},ops={}", "'ops' is given twice"),
        ("ops=softmax:float32", "ops=softmax:float32 is not a list of rules in braces"),
        ("ops={softmax}", "'softmax' is not a rule"),
        ("ops={softmax:float32", "a brace is not closed"),
        ('modules={"head:float32}', "a quote is not closed"),
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
        Policy.parse(torch.float16)


def test_float32_compute_over_low_parameters_is_refused() -> None:
    """Autocast only lowers, so such a policy would silently do nothing."""
    with pytest.raises(ValueError, match=r"autocast cannot raise a dtype"):
        Policy(params="bfloat16", compute="float32")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "bf16",
            r"Write Policy.parse\('bfloat16'\) for float32 parameters (.*) Policy.parse\('bf16-true'\) for",
        ),
        (torch.float16, r"Write Policy.parse\('float16'\) for float32 parameters .* or Policy.parse\('16-true'\) for"),
        (
            "bf16-mixed",
            r"Policy\(params='bf16-mixed'\): expected one of .* Write Policy.parse\('bf16-mixed'\)\.",
        ),
        ("compute=float16", r"Write Policy.parse\('compute=float16'\)\."),
        ("float17", r"Did you mean 'float16'\?"),
    ],
)
def test_what_belongs_into_parse(text: str, says: str) -> None:
    """The name of a policy as the first argument, which is the dtype of parameters."""
    with pytest.raises(ValueError, match=says):
        Policy(text)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_of_low_parameters(rounding: str) -> None:
    """It is printed and parsed, it is part of what is compared, and `compute` is the dtype of the parameters."""
    policy = Policy(params="bfloat16", rounding=rounding)
    assert policy.compute is torch.bfloat16
    assert str(policy) == f"params=bfloat16,compute=bfloat16,output=float32,rounding={rounding}"
    assert Policy.parse(str(policy)) == Policy.parse(f"params=bfloat16, Rounding={rounding}") == policy
    assert policy != Policy(params="bfloat16", compute="bfloat16")
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(("params", "rounding"), [("float32", "stochastic"), ("float16", "kahan"), ("bfloat16", "up")])
def test_rounding_that_cannot_be(params: str, rounding: str) -> None:
    """Only parameters in bfloat16 are rounded, in one of two ways."""
    with pytest.raises(ValueError, match=r"expected 'stochastic' or 'kahan', with params='bfloat16'"):
        Policy(params=params, rounding=rounding)


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


def test_rules_read_as_in_python() -> None:
    """The text form is documented: names of operations and classes bare, paths and patterns in double quotes."""
    text = (
        "params=float32,compute=bfloat16,output=float32,ops={add:promote,softmax:float16},"
        r'modules={"blocks\.\d+\.mlp":float16,"head":float32,torch.nn.LayerNorm:float32}'
    )
    policy = Policy(
        compute="bfloat16",
        ops={torch.nn.functional.softmax: "float16", torch.add: "promote"},
        modules={torch.nn.LayerNorm: "float32", "head": torch.float32, r"blocks\.\d+\.mlp": "float16"},
    )
    assert str(policy) == text
    assert Policy.parse(text) == policy
    spaced = text.replace(",", " , ").replace("{", "{ ").replace("}", " }").replace(":", " : ").replace("=", " = ")
    assert Policy.parse(spaced) == policy
    assert Policy.parse(text.replace("params=float32,compute=bfloat16,output=float32", "bf16-mixed")) == policy
    assert Policy.parse("bfloat16,ops={},modules={}") == Policy.parse("bfloat16")


class Outer:
    """Holds a class whose name has two dots behind its module's."""

    class Inner(nn.Module):
        """A module."""


@pytest.mark.parametrize(
    "cls", [nn.Linear, nn.Module, nn.modules.batchnorm._BatchNorm, torch.ao.nn.quantized.Linear, Outer.Inner]
)
def test_classes_have_names(cls: type[nn.Module]) -> None:
    """A class is written with the name under which it is imported again."""
    policy = Policy(modules={cls: "float32"})
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "name", ["LayerNorm", "torch.nn.Layernorm", "torch.nn", "no.such.Thing", "torch.Tensor", "a b.c"]
)
def test_unknown_class_says_how_to_write_a_path(name: str) -> None:
    """A bare word under modules is a class; the message says what a path looks like."""
    with pytest.raises(
        ValueError, match=r"is not the full name of a class.* A path or a pattern stands in double quotes"
    ):
        Policy.parse(f"modules={{{name}:float32}}")


def is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, FutureWarning):  # a warning, which is an error here: [[
        return False
    return True


CLASSES = st.sampled_from([nn.Linear, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, Outer.Inner])
PATTERNS = st.one_of(
    st.text().filter(is_pattern), st.sampled_from(['a"b', r"a\.b{2,3}:x", '""', "", ",}{", " x ", "a\nb"])
)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.one_of(CLASSES, PATTERNS), DTYPES), st.dictionaries(st.sampled_from(["add", "mm"]), DTYPES))
def test_any_rules_survive_as_text(modules: Any, ops: dict[str, str]) -> None:
    """parse(str(policy)) == policy with quotes, braces, commas and colons in the patterns, in whatever order."""
    policy = Policy(modules=modules, ops=ops)
    assert Policy.parse(str(policy)) == policy
    assert Policy(modules=dict(reversed(modules.items())), ops=ops) == policy
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)
    assert replace(policy, output="bfloat16").modules == policy.modules


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"(": "float32"}, r"\{'\(': 'float32'\}\): not a regular expression: missing \)"),
        ({int: "float32"}, "expected a class of modules, a path, or a regular expression"),
        ({nn.Linear(1, 1): "float32"}, "expected a class of modules"),
        ({"head": "promote"}, "expected one of float32, float16, bfloat16"),
        ("head", "expected a dict of rules"),
        ([("head", "float32"), ("head", "float16")], "float32 and float16 for 'head'"),
    ],
)
def test_wrong_module_rules(modules: Any, says: str) -> None:
    """A rule that can never work is refused when the policy is made."""
    with pytest.raises(ValueError, match=says):
        Policy(modules=modules)


def test_a_float16_rule_needs_scaling() -> None:
    """Gradients pass through the dtype of every rule."""
    assert Policy(compute="bfloat16", ops={"softmax": "float16"}).needs_scaling
    assert Policy(compute="bfloat16", modules={"head": "float16"}).needs_scaling
    assert not Policy(compute="bfloat16", ops={"add": "promote"}, modules={"head": "float32"}).needs_scaling


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("fp16", "float16"),
        ("FP16", "float16"),
        ("half", "float16"),
        ("torch.float16", "float16"),
        ("bf16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("fp32", "float32"),
        ("BF16-mixed", "bf16-mixed"),
        ("Params=fp16,Compute=half,output=torch.float16", "16-true"),
        ("bf16,ops={softmax:fp32}", "bfloat16,ops={softmax:float32}"),
    ],
)
def test_other_names_of_dtypes(text, same):
    """What other libraries call a dtype is understood, and written by torch's name."""
    assert Policy.parse(text) == Policy.parse(same)
    assert str(Policy.parse(text)) == str(Policy.parse(same))
    assert Policy(compute="BF16") == Policy(compute="bfloat16")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("float61", "float16"),
        ("bfloat", "bfloat16"),
        ("16-mix", "16-mixed"),
        ("param=float16", "params"),
        ("compute=floot16", "float16"),
        ("hlaf", "float16"),
    ],
)
def test_what_was_meant(text, meant):
    """A name that looks like a legal one gets a question behind the error."""
    with pytest.raises(ValueError, match=rf"Did you mean {meant!r}\?"):
        Policy.parse(text)
