"""Which operations of torch compute other bits when only the address of their input changes, on a GPU.

    python tests/benchmarks/addresses.py                   all operations, each in a process of its own
    python tests/benchmarks/addresses.py --only sum linear

The same values are given at an address that 512 divides, and 2 to 256 bytes behind one. A line per operation and dtype
says how many of the shapes and distances gave other bits, and at which distances. A kernel may fail at an odd address
and take its process with it, which the line says as well.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = ((64, 32), (50, 13), (64, 13), (33, 50), (128, 100), (256, 784), (7, 1001), (512, 512), (1000, 8), (32, 3072))
DISTANCES = (2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUT = 64  # features of matrix products

# Of an input and a weight; the weight of a matrix product has OUT rows.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "weight gradient of linear": lambda x, weight: x.new_ones(OUT, len(x)).cumsum(1).cos() @ x,
    "bmm": lambda x, weight: torch.bmm(x[None], weight.T[None]),
    "matrix and vector": lambda x, weight: x @ weight[0],
    "dot": lambda x, weight: x.flatten().dot(x.flatten()),
    "sum": lambda x, weight: x.sum(),
    "sum over rows": lambda x, weight: x.sum(0),
    "sum over columns": lambda x, weight: x.sum(1),
    "mean": lambda x, weight: x.mean(),
    "var": lambda x, weight: x.var(1),
    "norm": lambda x, weight: x.norm(),
    "foreach_norm": lambda x, weight: torch._foreach_norm([x])[0],
    "logsumexp": lambda x, weight: x.logsumexp(1),
    "cumsum": lambda x, weight: x.cumsum(1),
    "softmax": lambda x, weight: F.softmax(x, 1),
    "log_softmax": lambda x, weight: F.log_softmax(x, 1),
    "mse_loss": lambda x, weight: F.mse_loss(x, torch.zeros_like(x)),
    "layer_norm": lambda x, weight: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[1:]),
    "group_norm": lambda x, weight: F.group_norm(x[None], 1),
    "batch_norm": lambda x, weight: F.batch_norm(x, None, None, training=True),
    "conv1d": lambda x, weight: F.conv1d(x[:, None], weight[:, None, :3], padding=1),
    "gelu": lambda x, weight: F.gelu(x),
}


def placed(tensor: Tensor, distance: int) -> Tensor:
    """Return a copy that begins so many bytes behind an address that 512 divides."""
    memory = torch.empty(distance + tensor.nbytes, dtype=torch.uint8, device="cuda")
    assert memory.data_ptr() % 512 == 0
    return memory[distance:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def line(name: str, dtype: torch.dtype) -> str:
    """Return what happened to an operation, in words."""
    generator = torch.Generator().manual_seed(0)
    compared, other = 0, Counter[int]()
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator).to("cuda", dtype)
        weight = (torch.randn(OUT, shape[1], generator=generator) / shape[1] ** 0.5).to("cuda", dtype)
        expected = OPERATIONS[name](placed(x, 0), weight)
        for distance in DISTANCES:
            if distance % x.element_size() == 0:
                compared += 1
                other[distance] += not torch.equal(OPERATIONS[name](placed(x, distance), weight), expected)
    where = ", ".join(f"{count} at {distance} bytes" for distance, count in other.items() if count)
    return f"{name}, {dtype}: {other.total()} of {compared} have other bits" + (f" ({where})" if where else "")


def in_a_process(name: str) -> str:
    done = subprocess.run([sys.executable, __file__, "--here", name], capture_output=True, text=True, check=False)
    reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    return "\n".join([*done.stdout.splitlines(), *(f"{name}: ended early: {text}" for text in reason)])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--here", choices=OPERATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here.")
    if args.here:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
        torch.use_deterministic_algorithms(True)
        for dtype in DTYPES:
            print(line(args.here, dtype), flush=True)
        return 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for text in pool.map(in_a_process, args.only):
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
