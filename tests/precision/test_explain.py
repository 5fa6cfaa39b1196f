"""explain: the dtypes of a model read off fake tensors are those that it runs in, and nothing else is touched."""

import dataclasses
import json
import re
import sys
from collections import Counter

import forks
import pytest
import torch
from harness import DEVICES, Compiled, Net, onednn_computes_in
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.__main__ import main
from ampkit._precision.fake_tensors import fake_device
from ampkit._precision.op_recorder import OpRecorder

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Mixed(nn.Module):
    """Explicit casts, a region of its own autocast, functional attention with a mask, checkpointing, reductions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, *, mask=None):
        x = checkpoint(self.a, x, use_reentrant=False)
        with torch.autocast(x.device.type, enabled=False):
            x = self.b(x.float())
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.b(x) * 2 + torch.ones((), device=x.device)
        return {"out": F.gelu(self.norm(x.float())), "sum": x.sum(), "max": x.softmax(-1).amax()}


class Recurrent(nn.Module):
    """Recurrent layers, in both directions, and cells."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.cell = nn.LSTM(8, 8, 2, bidirectional=True), nn.GRU(16, 8), nn.LSTMCell(8, 8)

    def forward(self, x):
        return self.cell(self.gru(self.lstm(x)[0])[0][-1])


class Many(nn.Module):
    """Operations of every rule: lower, float32, with a dtype argument, promote; and some that have none."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 16), nn.GroupNorm(4, 16)
        self.up, self.act, self.down = nn.ConvTranspose2d(16, 16, 2), nn.PReLU(), nn.Conv2d(16, 4, 3, groups=4)
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2).unflatten(2, (4, 4))
        x = self.act(self.up(self.norm(x)))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        x = F.adaptive_avg_pool2d(self.down(x), 2).flatten(2)
        y = torch.einsum("bij,bkj->bik", x, x)
        z = torch.addcmul(y, x, x.float()) + torch.baddbmm(y, x, x) * torch.atan2(x, y)
        z = torch.cat([z, y.cumsum(-1), F.cosine_similarity(x, y, 1).unsqueeze(1)], 1)
        b = self.bilinear(z, z).sigmoid().log1p()
        return z.norm(), z.sum(0, dtype=torch.float64), z.exp().logsumexp(-1).prod(), torch.dot(b[0, 0], b[0, 1])


def encoder(batch_first=True, **kwargs):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first, **kwargs)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def torchvision_model(name, **kwargs):
    return getattr(pytest.importorskip("torchvision").models, name)(**kwargs)


SMALL_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
MODELS = {
    "net": lambda: (Net(), (torch.randn(4, 3, 8, 8),), {}),
    "mixed": lambda: (Mixed(), (torch.randn(2, 5, 16),), {"mask": torch.ones(5, 5, dtype=torch.bool).tril()}),
    "many": lambda: (Many(), (torch.arange(32).remainder(10).view(2, 16),), {}),
    "encoder": lambda: (encoder(), (torch.randn(2, 16, 64),), {}),
    "encoder, norm first": lambda: (encoder(False, norm_first=True, activation="gelu"), (torch.randn(16, 2, 64),), {}),
    "resnet50": lambda: (torchvision_model("resnet50", num_classes=10), (torch.randn(2, 3, 64, 64),), {}),
    "vit": lambda: (torchvision_model("VisionTransformer", **SMALL_VIT), (torch.randn(2, 3, 32, 32),), {}),
    "recurrent": lambda: (Recurrent(), (torch.randn(5, 2, 8),), {}),
}


def observed(model, inputs, kwargs, policy, device_type):
    """Run the model itself, on real tensors, under the same recorder."""
    model = model.to(device_type)
    inputs, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(device_type), (inputs, kwargs))
    recorder = OpRecorder(model)
    autocast = ampkit.Policy.parse(policy).autocast(device_type)
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda x: x), autocast, recorder:
        output = model(*inputs, **kwargs)
    assert output is not None
    return recorder


# Padding that some kernels of attention ask for, of heads or of the mask.
BY_KERNEL = {"constant_pad_nd"}


def seen(rows):
    """What is compared, row by row: module, operation, dtypes, how often, casts."""
    return [(*row.dtypes, row.count, row.casts) for row in rows if row.op not in BY_KERNEL]


@pytest.mark.slow
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(8)
def test_rows_are_what_runs(name, policy, training, device_type):
    """Module path, operation and dtypes equal, in order, those that a recorder sees on the real device."""
    model, inputs, kwargs = MODELS[name]()
    model.train(training)
    # With gradients, oneDNN's LSTM does not take float16 even where oneDNN computes in it, short of AMX-FP16.
    no_lstm = policy == "float16" or (policy == "bfloat16" and not onednn_computes_in(BF16))
    if device_type == "cpu" and name == "recurrent" and no_lstm:
        pytest.skip(f"oneDNN has no LSTM kernel for {policy} with gradients on this CPU")
    told = ampkit.explain(model, *inputs, policy=policy, device_type=device_type, **kwargs)
    recorder = observed(model, inputs, kwargs, policy, device_type)
    assert told.stopped is None
    assert seen(told.rows) == seen(recorder.rows())
    totals = recorder.totals()
    assert (told.totals.casts, told.totals.casts_back) == (totals.casts, totals.casts_back)
    assert told.totals.cast_bytes == totals.cast_bytes


@pytest.mark.parametrize(
    "name", ["net", "mixed", "encoder", pytest.param("resnet50", marks=[pytest.mark.slow, pytest.mark.seeds]), "vit"]
)
@pytest.mark.parametrize("policy", ["bfloat16", "float32"])
@pytest.mark.quick(3)
def test_bytes_kept_are_those_that_autograd_saves(name, policy):
    """Counted over the storages that the model's own graph keeps on the CPU; rows add up to the total."""
    model, inputs, kwargs = MODELS[name]()
    told = ampkit.explain(model, *inputs, policy=policy, device_type="cpu", **kwargs)
    saved = observed(model, inputs, kwargs, policy, "cpu").totals().saved_bytes
    # torch's fake normalisation takes bfloat16 for means and deviations that the CPU's kernel has in float32.
    less = 0 if policy == "float32" and name != "mixed" else 0.02 * saved
    assert 0 <= saved - told.totals.saved_bytes <= less
    assert told.totals.saved_bytes == sum(row.saved_bytes for row in told.rows)
    if policy == "float32":
        assert told.float32 == told.totals


def test_bytes_kept_of_a_known_model():
    """Linear, ReLU, Linear in bfloat16: inputs and weights cast, and the ReLU's output, once."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    told = ampkit.explain(model, torch.randn(16, 32), policy="bfloat16")
    x, hidden, weights = 16 * 32, 16 * 64, 32 * 64 + 64 * 8
    assert told.totals.saved_bytes == 2 * (x + hidden + weights) - 2 * 32 * 64  # no gradient of x, so no need of W1
    assert told.float32.saved_bytes == 4 * (x + hidden)
    assert told.totals.casts == 3
    assert told.totals.casts_back == 2
    assert told.totals.cast_bytes == 6 * (x + weights)
    assert [row.casts for row in told.rows] == [2, 0, 1]


EXPECTED = {  # of a ResNet-50 and of an encoder under float16 on CUDA: inputs before casts, compute, output
    ("conv1", "convolution"): ((F32,), F16, F16),
    ("bn1", "batch_norm"): ((F16, F32), F32, F16),
    ("layer3.5.conv3", "convolution"): ((F16, F32), F16, F16),
    ("layer4.2", "add_"): ((F16,), F16, F16),
    ("fc", "addmm"): ((F32, F16), F16, F16),
    ("layers.0.self_attn", "scaled_dot_product_attention"): ((F16,), F16, F16),
    ("layers.1.norm1", "native_layer_norm"): ((F32,), F32, F32),
    ("layers.2.linear2", "addmm"): ((F32, F16), F16, F16),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["resnet50", "encoder", "vit"])
@pytest.mark.slow
def test_cuda_without_gpu(name, training):
    """Dtypes for CUDA, on any machine, with full-size inputs, from a model on meta."""
    shapes = {"resnet50": (64, 3, 224, 224), "encoder": (64, 512, 64), "vit": (512, 3, 32, 32)}
    with torch.device("meta"):
        model, _, _ = MODELS[name]()
        x = torch.empty(shapes[name])
    told = ampkit.explain(model.train(training), x, policy="float16")
    assert told.stopped is None
    found = {(row.module, row.op): (row.inputs, row.compute, row.output) for row in told.rows}
    assert {key: value for key, value in EXPECTED.items() if key in found}.items() <= found.items()
    assert sum(key in found for key in EXPECTED) >= (0 if name == "vit" else 3)
    assert "scaled_dot_product_attention" in {op for _, op in found} or name == "resnet50"
    assert told.totals.saved_bytes < told.float32.saved_bytes
    assert told.float32.casts == 0


def test_lstm_under_bfloat16_runs_in_float16():
    """torch's autocast kernel for cuDNN's recurrent layers says float16, whatever autocast is set to."""
    told = ampkit.explain(nn.LSTM(8, 8, proj_size=4), torch.randn(5, 2, 8), policy="bfloat16")
    assert [(row.op, row.inputs, row.output) for row in told.rows] == [("_cudnn_rnn", (F32,), F16)]


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_touches_nothing(device_type):
    """Model, hooks, gradients, buffers, autocast, grad mode, kernels and the random-number state stay as they are."""
    model, inputs, _ = MODELS["net"]()
    tensors = {**model.state_dict(keep_vars=True)}
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors.items()}
    rng = torch.get_rng_state()
    ampkit.explain(model, *inputs, policy="float16", device_type=device_type)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.grad is None
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    for key in ("CUDA", "AutogradCUDA"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", key)
    assert not isinstance(inputs[0] + 1, torch._subclasses.FakeTensor)
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not torch.autocast("cuda")._enabled


def test_leaves_no_trace_after_an_error():
    """A model that raises raises here too, and every mode is left."""
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        ampkit.explain(nn.Linear(3, 4), torch.randn(2, 5), policy="float16")
    assert type(torch.randn(2) + 1) is torch.Tensor
    assert torch.backends.mha.get_fastpath_enabled()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            return self.second(x)
        return x


def test_model_that_reads_a_value():
    """The rows are there up to the line that needs data, and the line is named."""
    told = ampkit.explain(nn.Sequential(nn.ReLU(), Reads()), torch.randn(2, 4), policy="float16")
    assert [row.op for row in told.rows] == ["relu", "addmm", "sum", "gt"]
    assert told.stopped is not None
    assert told.stopped.startswith("in 1: DataDependentOutputException")
    assert "if x.sum() > 0:" in told.stopped
    assert f"{__file__}:" in told.stopped
    assert f"Stopped {told.stopped}" in str(told)


def test_no_policy_is_the_callers_autocast():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        told = ampkit.explain(model, x, device_type="cpu")
    assert told.rows[0].output is F16
    assert told.policy == "autocast as it was"
    assert ampkit.explain(model, x, device_type="cpu").rows[0].output is F32
    inside = {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside["float32"] = ampkit.explain(model, x, policy="float32", device_type="cpu").rows[0].output
    assert inside["float32"] is F32


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(context):
    """Under no_grad and in inference mode the same rows, and nothing kept."""
    model, inputs, _ = MODELS["encoder"]()
    with context():
        told = ampkit.explain(model, *inputs, policy="float16")
    assert [row.dtypes for row in told.rows] == [
        row.dtypes for row in ampkit.explain(model, *inputs, policy="float16").rows
    ]
    assert told.totals.saved_bytes == told.totals.casts_back == 0


def test_op_rule_shows():
    """A11: what a policy's `ops` says is what the rows say."""
    policy = ampkit.Policy(compute=F16, ops={"softmax": F16, "add": F32})

    class Softmax(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1), torch.add(x, 1)

    x = torch.randn(2, 4, dtype=F16)
    by_op = {row.op: row for row in ampkit.explain(Softmax(), x, policy=policy).rows}
    assert (by_op["_softmax"].compute, by_op["add"].compute) == (F16, F32)
    assert (by_op["_softmax"].casts, by_op["add"].casts) == (0, 1)


def test_module_rule_shows():
    """A11: what a policy's `modules` says is what the rows say; the model itself gets no rule."""
    policy = ampkit.Policy(compute=F16, modules={"1": F32})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    told = ampkit.explain(model, torch.randn(2, 4), policy=policy)
    assert {row.module: row.compute for row in told.rows if row.op == "addmm"} == {"0": F16, "1": F32}
    with torch.autocast("cpu", dtype=BF16):
        assert model(torch.randn(2, 4)).dtype is BF16
    # Rules that are on the model already show too, and not in the totals of float32.
    told = ampkit.explain(policy.apply(model), torch.randn(2, 4), policy=ampkit.Policy(compute=F16))
    assert {row.module: row.compute for row in told.rows if row.op == "addmm"} == {"0": F16, "1": F32}
    assert told.totals.casts > told.float32.casts == 0


@pytest.mark.slow
def test_data_dependent_library():
    """What stops in another library names the line there."""
    models = pytest.importorskip("torchvision").models
    detector = models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).eval()
    told = ampkit.explain(detector, [torch.rand(3, 320, 320)], policy="float16")
    assert told.stopped is not None
    assert "torchvision" in told.stopped
    assert len(told.rows) > 50


def test_compiled_model():
    """It is explained as it was before torch.compile."""
    plain, compiled = nn.Linear(4, 4), torch.compile(nn.Linear(4, 4))
    in_place = nn.Linear(4, 4)
    in_place.compile()
    x = torch.randn(2, 4)
    expected = [row.dtypes for row in ampkit.explain(plain, x, policy="float16").rows]
    assert [row.dtypes for row in ampkit.explain(in_place, x, policy="float16").rows] == expected
    told = ampkit.explain(compiled, x, policy="float16")
    assert [("", *row.dtypes[1:]) for row in told.rows] == expected


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_runs_on_behind_it(warm):
    """What was explained, or watched on real tensors, runs compiled afterwards; all its operations were seen."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(2, 4)
    compiled = Compiled(model)
    if warm:
        compiled.module(x)
    before = compiled.calls
    expected = [row.op for row in ampkit.explain(model, x).rows]
    assert [row.op for row in ampkit.explain(compiled.module, x).rows] == expected
    with OpRecorder(model) as recorder:
        compiled.module(x)
    assert [row.op for row in recorder.rows()] == expected
    assert compiled.calls == before
    for _ in range(3):
        compiled.module(x)
    assert (compiled.calls, compiled.compiles) == (before + 3, 1)


def test_tied_and_non_parameter_tensors():
    """Shared parameters stay shared; a tensor in a plain attribute stays where it is, as with `model.to(device)`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    told = ampkit.explain(model, torch.randn(2, 4), policy="float16")
    assert [row.casts for row in told.rows] == [3, 1]  # the shared weight is cast once

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.masks = [torch.ones(4)]

        def forward(self, x):
            assert self.masks[0].device.type == "cpu"
            return x * self.masks[0].to(x.device)

    assert [row.op for row in ampkit.explain(Plain(), torch.randn(2, 4), policy="float16").rows] == ["mul"]
    model, forwards = Plain(), []
    model.forward = lambda x: forwards.append(x) or x * 2
    assert [row.op for row in ampkit.explain(model, torch.randn(2, 4), policy="float16").rows] == ["mul"]
    assert isinstance(forwards[0], torch._subclasses.FakeTensor)


def test_lazy_model():
    with pytest.raises(ValueError, match="a lazy module has no parameters yet"):
        ampkit.explain(nn.LazyLinear(3), torch.randn(2, 4), policy="float16")


@pytest.mark.parametrize("kwargs", [{"policy": "fp8"}, {"device_type": "gpu"}])
def test_wrong_argument(kwargs):
    with pytest.raises(ValueError, match=r"Policy\.parse|explain\(device_type='gpu'\): expected one of 'cuda', 'cpu'"):
        ampkit.explain(nn.Linear(4, 4), torch.randn(2, 4), **kwargs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", [72, 80, 100, 160])
@pytest.mark.slow
def test_table_fits_the_terminal(columns, monkeypatch):
    """No line is wider; repeated blocks are one row; what is hidden is said; all=True hides nothing."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "40")
    model, inputs, _ = MODELS["resnet50"]()
    told = ampkit.explain(model, *inputs, policy="float16")
    table = told.table()
    assert max(map(len, table.splitlines())) <= columns
    assert len(table.splitlines()) <= 40
    assert ".*.conv1" in table
    assert "more rows" in table
    assert "layer1.0.downsample.0" in table or columns == 72
    assert len(told.table(all=True).splitlines()) > len(told.rows)
    assert "more rows" not in told.table(all=True)
    assert str(told) == table


def test_rows_shown_add_up(monkeypatch):
    """Collapsing and hiding loses no operation: the counts of the shown and hidden rows are those of all rows."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")
    model, inputs, _ = MODELS["vit"]()
    told = ampkit.explain(model, *inputs, policy="float16")
    lines = told.table().splitlines()
    runs = [int(line[lines[2].index(" runs") :].split()[0]) for line in lines[3 : lines.index("", 3)]]
    assert sum(runs) == sum(row.count for row in told.rows)


def test_json():
    model, inputs, _ = MODELS["net"]()
    told = ampkit.explain(model, *inputs, policy="float16")
    read = json.loads(told.to_json())
    assert len(read["rows"]) == len(told.rows)
    assert read["rows"][0] == {
        **dataclasses.asdict(told.rows[0]),
        "inputs": ["float32"],
        "compute": "float16",
        "output": "float16",
    }
    assert read["totals"] == dataclasses.asdict(told.totals)
    assert (read["policy"], read["training"], read["stopped"]) == (told.policy, True, None)


MODULE = """
import torch

def both():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)

def tensor():
    return torch.nn.Linear(4, 4), torch.randn(2, 4), {}

def model():
    return torch.nn.Linear(4, 4)

def three():
    return torch.nn.Linear(4, 4), torch.randn(2, 4), 5

def broken():
    raise ValueError("the user's own")

number = 5
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the module above."""
    (tmp_path / "made.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_command(folder):
    """It prints the table and writes the JSON of what the named function, of a module in this folder, returns."""
    options = ["--policy", "bfloat16", "--json", "out.json", "--all"]
    done = forks.run_ampkit("explain", "made:both", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "addmm" in done.stdout
    assert done.stdout.startswith("params=float32,compute=bfloat16,output=float32 on cuda")
    assert json.loads((folder / "out.json").read_text())["rows"][0]["compute"] == "bfloat16"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("made", "expected module:function"),
        ("nowhere:f", "No module named 'nowhere'"),
        ("made:g", "has no attribute 'g'"),
        ("made:number", "is int, expected a function that returns (model, inputs)"),
        ("made:model", "returned Linear, expected (model, inputs)"),
        ("made:three", "returned (Linear, Tensor, int), expected (model, inputs)"),
    ],
)
def test_command_says_what_is_wrong(folder, call, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    assert main(["explain", call]) == 2
    assert re.match(f"python -m ampkit explain: error: .*{re.escape(message)}", capsys.readouterr().err)
    sys.modules.pop("made", None)


def test_command_does_not_swallow_errors(folder, monkeypatch, capsys):
    """What the named function itself raises keeps its traceback."""
    monkeypatch.syspath_prepend(folder)
    assert main(["explain", "made:broken"]) == 3
    said = capsys.readouterr().err
    assert 'made.py", line 17, in broken' in said
    assert "ValueError: the user's own" in said
    sys.modules.pop("made")


def test_command_takes_one_tensor(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    assert main(["explain", "made:tensor", "--device", "cpu"]) == 0
    sys.modules.pop("made")
    assert "addmm" in capsys.readouterr().out


def test_fake_device_restores(monkeypatch):
    """Also where the body raises."""
    available = torch.cuda.amp.common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    with pytest.raises(KeyError), fake_device("cuda"):
        raise KeyError
    assert available == (torch.cuda.amp.common.amp_definitely_not_available, torch.cuda.is_bf16_supported)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["net", "encoder", "resnet50"])
def test_casts_back_on_the_device(name):
    """Backward of the real model casts at least as many gradients as are told: one for each cast that has one."""
    model, inputs, kwargs = MODELS[name]()
    told = ampkit.explain(model, *inputs, policy="float16", **kwargs)
    model.cuda()
    with torch.autocast("cuda", dtype=F16):
        loss = model(*(x.cuda() for x in inputs)).float().sum()
    with torch.autograd.set_multithreading_enabled(False), OpRecorder(model) as recorder:
        loss.backward()
    casts = Counter(row.op for row in recorder.rows())
    assert recorder.totals().casts >= told.totals.casts_back, casts


@pytest.mark.skipif(torch.cuda.is_available(), reason="a torch without CUDA has no device")
def test_torch_built_without_cuda(monkeypatch):
    """No graph is built there, as the process would end: the same rows, and nothing is told of backward."""
    model, inputs, _ = MODELS["net"]()
    expected = ampkit.explain(model, *inputs, policy="float16")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    told = ampkit.explain(model, *inputs, policy="float16")
    assert seen(told.rows) == seen(expected.rows)
    assert (expected.saves, told.saves, told.totals.saved_bytes) == (True, False, 0)
    assert "needs a CUDA build" in str(told)
    assert "needs a CUDA build" not in str(expected)
    stopped = ampkit.explain(Reads(), torch.randn(2, 4), policy="float16").stopped
    assert stopped is not None
    assert "built without CUDA" in stopped


@pytest.mark.parametrize("bias", [True, False])
def test_a_gru_cell_for_cuda(bias):
    """torch has no fake kernel of the cell that runs on CUDA: without a GPU it is explained to its end all the same."""
    told = ampkit.explain(nn.GRUCell(8, 16, bias=bias), torch.randn(2, 8), policy="float16", device_type="cuda")
    assert [(row.op, row.output) for row in told.rows] == [("mm", F16), ("_thnn_fused_gru_cell", F16)]
    assert "Stopped" not in str(told)
