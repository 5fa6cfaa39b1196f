"""op_table: every operation that the dispatcher has an autocast kernel for, with the rule that it is seen to follow."""

import contextlib
import functools
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from counts import Functions
from harness import VERSION
from torch.nn import functional as F

import ampkit
from ampkit.__main__ import main

with contextlib.suppress(ImportError):
    import torchvision  # noqa: F401 - it registers operations of its own, and another test may import it


table_of = functools.cache(ampkit.op_table)

# From torch's documentation of automatic mixed precision ("CUDA Ops that can autocast to float16" and so on), and for
# CPU from "CPU Ops that can autocast to bfloat16".
DOCUMENTED = {
    "cuda": {
        "lower": "addmm bmm conv2d conv_transpose3d.input linear lstm_cell matmul mv prelu chain_matmul",
        "float32": "acos cosine_similarity exp group_norm kl_div layer_norm log mse_loss nll_loss pow.Tensor_Scalar "
        "reciprocal rsqrt softplus tan binary_cross_entropy_with_logits",
        "float32 dtype argument": "cumprod cumsum log_softmax.int norm.Scalar prod softmax.int sum sum.dim_IntList",
        "promote": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot",
        "banned": "binary_cross_entropy",
    },
    "cpu": {
        "lower": "conv1d conv2d bmm mm linear matmul baddbmm addmm scaled_dot_product_attention",
        "float32": "avg_pool3d binary_cross_entropy grid_sampler mse_loss cosine_embedding_loss nll_loss prod "
        "quantile trace stft cdist view_as_complex cholesky_solve linalg_inv fft_fft replication_pad2d",
        "promote": "stack cat index_copy",
    },
}
EXPECTED = [
    (device_type, f"aten::{op}", rule)
    for device_type, rules in DOCUMENTED.items()
    for rule, ops in rules.items()
    for op in ops.split()
]


@pytest.mark.parametrize(("device_type", "dispatch_key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_no_operation_is_missed(device_type, dispatch_key):
    """A5: every operation and overload that the dispatcher says autocast has a kernel for has a rule."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, dispatch_key)}
    aten = {name for name in names if name.startswith("aten::")}
    assert set(table_of(device_type)) >= aten
    assert not [op for op in aten if table_of(device_type)[op] == "unknown"]


@pytest.mark.parametrize(("device_type", "op", "rule"), EXPECTED)
def test_rule_is_the_documented_one(device_type, op, rule):
    """A2, A3: the rule that was seen is the one that torch documents."""
    assert table_of(device_type)[op] == rule


def test_cpu_and_cuda_differ():
    """A2: softmax and layer_norm have a rule on CUDA only; binary_cross_entropy is banned there and float32 on CPU."""
    cuda, cpu = table_of("cuda"), table_of("cpu")
    assert "aten::softmax.int" in cuda
    assert "aten::softmax.int" not in cpu
    assert (cuda["aten::binary_cross_entropy"], cpu["aten::binary_cross_entropy"]) == ("banned", "float32")


X = torch.rand(4, 4)
CALLS = {
    "aten::mm": lambda x, y: torch.mm(x, y),
    "aten::linear": lambda x, y: F.linear(x, y),
    "aten::mse_loss": lambda x, y: F.mse_loss(x, y),
    "aten::trace": lambda x, y: torch.trace(x),
    "aten::binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y),
    "aten::cat": lambda x, y: torch.cat([x, y]),
    "aten::stack": lambda x, y: torch.stack([x, y]),
    "aten::prod.dim_int": lambda x, y: x.prod(0),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_rule_on_cpu_tells_the_output(op, dtypes):
    """A1 to A3: what an operation returns under autocast on the CPU follows from its rule."""
    x, y = (X.to(dtype) for dtype in dtypes)
    expected = {"lower": torch.bfloat16, "float32": torch.float32, "promote": torch.float32}[table_of("cpu")[op]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALLS[op](x, y).dtype is expected


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_leaves_no_trace(device_type):
    """Autocast state, cache and modes are as they were, and what they are does not change the table."""
    with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode():
        assert ampkit.op_table(device_type) == table_of(device_type)
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_enabled("cuda")
        assert type(torch.mm(X, X)) is torch.Tensor


@pytest.mark.slow
def test_warnings_of_probed_operations_are_not_heard(capfd):
    """chain_matmul is deprecated, in C++ and once a process: nothing of that reaches the user."""
    ampkit.op_table("cuda")
    done = forks.run_code("import warnings; warnings.simplefilter('error'); import ampkit; ampkit.op_table('cuda')")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_calls_each_operation_a_few_times():
    """Tensors included, 14 functions of torch are called per operation: a table takes about a second."""
    with Functions() as functions:
        table = ampkit.op_table("cuda")
    assert functions.calls < 20 * len(table)


@pytest.mark.slow
def test_operation_of_another_library():
    """It is listed with the rule it follows; one whose rule cannot be read is listed as unknown, with the reason."""
    with torch.library._scoped_library("ampkit_test", "FRAGMENT") as library:
        for name in ("lowered", "odd"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_autocast("ampkit_test::lowered", "cpu", torch.float16, lib=library)
        library.impl("odd", lambda x: x.clone(), "AutocastCPU")
        table = ampkit.op_table("cpu")
    assert table["ampkit_test::lowered"] == "lower"
    assert table["ampkit_test::odd"] == "unknown"
    assert table.notes["ampkit_test::odd"]
    assert "ampkit_test::odd: " in str(table)


def test_unknown_device_type():
    with pytest.raises(ValueError, match=r"op_table\(device_type='gpu'\): expected one of 'cuda', 'cpu'"):
        ampkit.op_table("gpu")


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_table_is_a_value(device_type):
    """Frozen, hashable, equal to its copies; JSON and pickle give it back."""
    table = table_of(device_type)
    assert ampkit.OpTable.from_json(table.to_json()) == table
    assert pickle.loads(pickle.dumps(table)) == table
    assert hash(ampkit.OpTable.from_json(table.to_json())) == hash(table)
    assert len(table) == len(list(table)) == sum(map(len, table.by_rule().values()))
    with pytest.raises(TypeError):
        table.rules["aten::mm"] = "float32"
    with pytest.raises(AttributeError):
        table.device_type = "cpu"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_printed_table_fits(width):
    """No line is wider than asked, and every operation is in it."""
    for table in map(table_of, ("cuda", "cpu")):
        text = table.table(width)
        assert max(map(len, text.splitlines())) <= width
        assert set(text.replace(",", " ").replace("(", " ").split()) >= {op.removeprefix("aten::") for op in table}


def changed(table, **rules):
    """Return a table of another torch in which these operations have other rules; None removes one."""
    merged = {**table, **{f"aten::{op}": rule for op, rule in rules.items()}}
    return ampkit.OpTable(table.device_type, "9.9", {op: rule for op, rule in merged.items() if rule})


def test_diff():
    """It names what changed, appeared and disappeared, and gives the rules that undo it."""
    table = table_of("cuda")
    diff = table.diff(changed(table, sin="float32", exp="lower", mm=None, dot="float32"))
    assert dict(diff.changes) == {
        "aten::dot": ("promote", "float32"),
        "aten::exp": ("float32", "lower"),
        "aten::mm": ("lower", None),
        "aten::sin": (None, "float32"),
    }
    assert "aten::sin: no autocast kernel -> float32" in str(diff)
    assert diff.pins("bfloat16") == {"dot": "promote", "exp": "float32", "mm": "bfloat16", "sin": "bfloat16"}
    assert not table.diff(table)
    assert "the same rules" in str(table.diff(table))
    with pytest.raises(ValueError, match=r"this table is of 'cuda', the other of 'cpu'"):
        table.diff(table_of("cpu"))


def test_an_overload_that_torch_does_not_have_is_not_pinned():
    """Torch 2.13 removed those by dimension name: softmax has the rule that it had."""
    before = changed(table_of("cuda"), **{"softmax.of_old": "float32", "softmax.int": "lower"})
    diff = before.diff(table_of("cuda"))
    assert diff.changes["aten::softmax.of_old"] == ("float32", None)
    assert diff.pins("float16") == {"softmax": "float16"}
    assert not changed(table_of("cuda"), **{"softmax.of_old": "float32"}).diff(table_of("cuda")).pins("float16")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device_type": "cuda", "torch": "2", "rules": {"mm": "lowest"}}'])
def test_json_that_is_no_table(text):
    with pytest.raises(ValueError, match=r"expected what OpTable\.to_json wrote"):
        ampkit.OpTable.from_json(text)


@pytest.mark.slow
def test_command_prints_and_compares(tmp_path, capsys, monkeypatch):
    """`ops` prints the table and writes it; --diff is silent about equal rules and exits with 1 for different ones."""
    monkeypatch.setattr("ampkit.__main__.op_table", functools.cache(ampkit.op_table))
    file, other = tmp_path / "ops.json", tmp_path / "other.json"
    assert main(["ops", "--device", "cpu", "--json", str(file)]) == 0
    assert f"autocast on cpu, torch {torch.__version__}" in capsys.readouterr().out
    assert json.loads(file.read_text())["rules"]["aten::mm"] == "lower"
    assert main(["ops", "--device", "cpu", "--diff", str(file)]) == 0
    assert "the same rules" in capsys.readouterr().out
    other.write_text(changed(table_of("cpu"), mm=None, cat="float32", upsample_linear1d="float32").to_json())
    assert main(["ops", "--device", "cpu", "--diff", str(other)]) == 1
    printed = capsys.readouterr().out
    assert "aten::mm: no autocast kernel -> lower" in printed
    assert "ops={'cat': 'float32', 'mm': 'float16'}" in printed
    assert main(["ops", "--device", "cuda", "--diff", str(file)]) == 2
    assert "compare tables of one device" in capsys.readouterr().err


def test_command_refuses_what_is_no_table(tmp_path, capsys):
    for path in (tmp_path / "none.json", tmp_path):
        assert main(["ops", "--diff", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.skipif(VERSION != (2, 11), reason="docs/op-tables.md is of torch 2.11")
def test_page_is_up_to_date():
    """docs/op-tables.md is what docs/op_tables.py writes."""
    script = Path(__file__).parents[2] / "docs" / "op_tables.py"
    made = runpy.run_path(str(script))
    assert made["PAGE"].read_text() == made["page"](), "run python docs/op_tables.py"


@pytest.mark.cuda
def test_table_needs_no_gpu():
    """A5: the table of CUDA read without a GPU is the one read on it."""
    code = "import ampkit; print(ampkit.op_table('cuda').to_json())"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=hidden)
    without = ampkit.OpTable.from_json(done.stdout)
    assert {op: rule for op, rule in table_of("cuda").items() if op.startswith("aten::")} == dict(without)


@pytest.mark.cuda
@pytest.mark.skipif(VERSION >= (2, 13), reason="torch 2.13 removed dimension names: pytorch#173895")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_overloads_by_name_follow_their_siblings():
    """A5: what the table takes over for dimension names, as no fake tensor has them, is so on the device."""
    x = torch.rand(4, 4, device="cuda", dtype=torch.float16).rename("A", "B")
    taken = [op for op, note in table_of("cuda").notes.items() if "dimension names" in note]
    assert len(taken) == 7
    with torch.autocast("cuda", dtype=torch.float16):
        for op in taken:
            name = op.removeprefix("aten::").partition(".")[0]
            if name != "norm":  # which torch refuses for named tensors, whatever autocast does
                assert getattr(torch, name)(x, ["A"] if name == "sum" else "A").dtype is torch.float32, op


def test_an_operation_with_a_private_name():
    """A5: it has a rule by the name that the dispatcher gives it."""
    assert table_of("cuda")["aten::_cudnn_rnn"] == "lower"
