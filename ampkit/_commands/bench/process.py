"""Keeps variants that are measured in one process from disturbing each other, and gives all the same conditions."""

import gc
import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from ..._torch.compile import forget_compiled_code
from ..._torch.device.allocator import clear_cublas_workspaces


def clean_up(device: torch.device) -> None:
    """Free all that the last variant used: modules, compiled code, graphs, memory."""
    forget_compiled_code()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()  # otherwise only the first variant on a stream would pay for them
        torch.cuda.empty_cache()


@contextmanager
def little_garbage() -> Iterator[None]:
    """Context in which garbage collection ignores older objects. Otherwise each `clean_up` would take 0.2 s."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextmanager
def fast_kernels(device: torch.device) -> Iterator[None]:
    """Context in which all variants use torch's fastest kernels, TF32 included, and torch.compile does not warn."""
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
        for text in (
            "`torch.jit.script_method` is deprecated",  # inductor imports something that uses it
            "bf16 and fp16 are mixed",  # inductor's C++ code for the CPU is not vectorised then
            "Please use the new API settings to control TF32",
        ):
            warnings.filterwarnings("ignore", text)
        warnings.filterwarnings("ignore", module="lightning")
        if device.type != "cuda":
            yield
            return
        precision = torch.get_float32_matmul_precision()
        backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined] # no stub
        settings = [backend.fp32_precision for backend in backends]
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for backend, setting in zip(backends, settings, strict=True):
                backend.fp32_precision = setting  # set_float32_matmul_precision turns "none" into "ieee"


def pay_one_time_costs(device: torch.device, *, compiles: bool, lightning: bool) -> None:
    """Import what variants import late and start the compiler, so that no variant's time includes this."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports parts of the compiler
    if lightning:
        with suppress(ImportError):  # the variant's row shows the error
            importlib.import_module("ampkit.lightning")
    if compiles:
        with suppress(Exception):  # without a C compiler; the variants' rows show the error
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device)
            torch.compile(model)(torch.ones(8, 8, device=device)).sum().backward()


class Caches(ExitStack):
    """Gives each variant of each case a cache of compiled code of its own, so that none profits from another's.

    Args:
        kept: the folder of the caches. None for one that is empty, and deleted when this context ends.
    """

    def __init__(self, kept: Path | None = None) -> None:
        super().__init__()
        self._root = kept or Path(self.enter_context(tempfile.TemporaryDirectory(prefix="ampkit-bench-")))

    @contextmanager
    def of(self, *names: object) -> Iterator[None]:
        """Context in which torch.compile uses the cache of these names. A later context of the same names finds it."""
        folder = Path(self._root, "-".join(map(str, names)).replace(os.sep, "-"))
        new = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        before = {name: os.environ.get(name) for name in new}
        os.environ.update(new)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})
