"""tests/benchmarks/kernels.py, but for what a GPU does: kernels are counted, and named by what they are for."""

import kernels
import pytest

INDUCTOR = """
# Topologically Sorted Source Nodes: [loss], Original ATen: [aten._log_softmax, aten.nll_loss_forward]
# Source node to ATen node mapping:
#   loss => amax
triton_per_fused_0 = async_compile.triton('triton_per_fused_0', '''
def triton_per_fused_0(in_ptr0): pass
''', device_str='cuda')


# Topologically Sorted Source Nodes: [a], Original ATen: [aten.lerp]
# Topologically Sorted Source Nodes: [b], Original ATen: [aten.lerp, aten.addcdiv]
triton_for_fused_1 = async_compile.triton(
    'triton_for_fused_1', '''
''')
async_compile.wait(globals())
# Topologically Sorted Source Nodes: [c], Original ATen: [aten.mm]
def call(args): pass
"""
HLO = """
HloModule jit_scan

%fused_computation.1 (param_0: f32[64]) -> f32[64] {
  %param_0 = f32[64]{0} parameter(0)
  ROOT %multiply.2 = f32[64]{0} multiply(%param_0, %param_0)
}

%body.1 (arg: (s32[], f32[64])) -> (s32[], f32[64]) {
  %arg = (s32[], f32[64]{0}) parameter(0)
  %get-tuple-element.1 = f32[64]{0} get-tuple-element(%arg), index=1
  %custom-call.1 = (f32[64]{0}, s8[100]{0}) custom-call(%get-tuple-element.1), custom_call_target="__cublas$gemm"
  %loop_fusion.3 = f32[64]{0} fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_computation.1
  %copy.1 = f32[64]{0} copy(%loop_fusion.3)
  ROOT %tuple.1 = (s32[], f32[64]{0}) tuple(%get-tuple-element.1, %copy.1)
}

ENTRY %main.1 (p: f32[64]) -> (s32[], f32[64]) {
  %p = f32[64]{0} parameter(0)
  %fusion.9 = f32[64]{0} fusion(%p), kind=kInput, calls=%fused_computation.1
  ROOT %while.1 = (s32[], f32[64]{0}) while(%tuple), condition=%condition.1, body=%body.1
}
"""


@pytest.mark.parametrize(
    ("name", "operations", "expected"),
    [
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x6_nn", "", "gemm"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "", "gemm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "", "loss"),
        ("triton_for_fused_1", "aten.lerp, aten.addcdiv", "update"),
        ("triton_red_fused_2", "aten.sum, aten.threshold_backward", "bias gradient + relu"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "", "cast or copy"),
    ],
)
def test_purposes(name: str, operations: str, expected: str) -> None:
    """Kernels of torch, of cuBLAS and of Inductor."""
    assert kernels.purpose(name, operations) == expected


def test_kernels_are_counted_per_step() -> None:
    """Two kernels in four steps, one of them twice in each; the slower one comes first."""
    events = [("a", 1.0), ("b", 5.0), ("a", 2.0)] * 4
    found = kernels.kernels_of(events, 4, {"b": "aten.mm"})
    assert [(kernel.name, kernel.count, kernel.us) for kernel in found] == [("b", 1.0, 5.0), ("a", 2.0, 3.0)]
    assert found[0].purpose == "gemm"


def test_operations_of_inductors_kernels() -> None:
    """Each kernel has the operations that are written above it; those of a call of a library belong to no kernel."""
    assert kernels.inductor_operations(INDUCTOR) == {
        "triton_per_fused_0": "aten._log_softmax, aten.nll_loss_forward",
        "triton_for_fused_1": "aten.lerp, aten.addcdiv",
    }


def test_operations_of_xlas_loop() -> None:
    """What the body of the loop launches: a gemm, a fusion and a copy; nothing of the entry."""
    assert kernels.hlo_operations(HLO) == {"custom-call __cublas$gemm": 1, "fusion kLoop": 1, "copy": 1}
    assert kernels.hlo_operations(HLO.replace("while(", "tuple("))["fusion kInput"] == 1
    assert kernels.hlo_fusions(HLO) == {"loop_fusion_3": "multiply", "fusion_9": "multiply"}


def test_kernels_in_a_trace_of_jax() -> None:
    """Those on a stream of a GPU; neither the host's work nor summaries of steps."""
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
            {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "Steps"}},
            {"ph": "X", "name": "loop_fusion_3", "pid": 1, "tid": 7, "ts": 1, "dur": 2.5},
            {"ph": "X", "name": "step", "pid": 1, "tid": 8, "ts": 1, "dur": 9},
            {"ph": "X", "name": "python", "pid": 2, "tid": 7, "ts": 1, "dur": 9},
        ]
    }
    assert list(kernels.trace_events(trace)) == [("loop_fusion_3", 2.5)]
