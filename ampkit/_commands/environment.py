"""The command `env`: the facts about machine and installation that a bug report needs, and no secrets."""

import json
import os
import platform
import re
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._text import size_text
from .._torch.tensors.settings import SETTINGS, settings

_PACKAGES = (
    *("numpy", "triton", "lightning", "torchmetrics", "transformers", "accelerate", "torchao", "tensordict"),
    *("torchvision", "matplotlib"),
)
# Environment variables that decide which kernels run, how memory is allocated and how ranks communicate. None of them
# contains a personal name or a secret.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_JIT"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_LINALG_PREFER_CUSOLVER"),
    *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_LOGS"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_CUDA_EVENT_CACHE", "TORCH_NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_AVOID_RECORD_STREAMS"),
    *("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_GRAPH_REGISTER", "NCCL_GRAPH_MIXING_SUPPORT"),
    *("NCCL_LAUNCH_MODE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE",
)
_IN_JSON = (bool, int, float, str, type(None))
_DRIVER = Path("/proc/driver/nvidia/version")


class Environment:
    """The machine and software that ampkit, of this version, runs on. Prints as text.

    Sync: none. Reading the properties of the devices initialises CUDA, but allocates no memory there.
    """

    def __init__(self, ampkit: str) -> None:
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        self.facts: dict[str, Any] = {
            "ampkit": ampkit,
            "torch": {  # its version, and those of the libraries it was built with, None for one that it lacks
                "version": str(torch.__version__),
                "git": torch.version.git_version,
                "cuda": torch.version.cuda,
                "hip": torch.version.hip,
                "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
            },
            "python": platform.python_version(),
            "os": platform.platform(),
            "cpu": {"cores": os.cpu_count(), "capability": torch.backends.cpu.get_cpu_capability()},
            "cuda": _cuda(),
            "packages": {
                name: next((found.version for found in metadata.distributions(name=name)), None) for name in _PACKAGES
            },
            "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "settings": {
                name: value if isinstance(value, _IN_JSON) else str(value)
                for name, value in zip(SETTINGS, settings(), strict=True)
            },
        }

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.facts, indent=1)

    def __str__(self) -> str:
        facts = self.facts
        torch_, cpu, cuda = facts["torch"], facts["cpu"], facts["cuda"]
        libraries = {"cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}
        built = ", ".join(f"{name} {torch_[key] or 'none'}" for key, name in libraries.items())
        gpus = [
            f"{gpu['name']}, compute capability {gpu['capability']}, {size_text(gpu['memory_bytes'])}, "
            f"{gpu['multiprocessors']} multiprocessors"
            for gpu in cuda["gpus"]
        ]
        gpus = gpus or [f"none: {cuda['why_not'] or 'no device is visible'}"]
        lines = [
            ("ampkit", facts["ampkit"]),
            ("torch", f"{torch_['version']} (git {torch_['git']}), built with {built}"),
            ("python", facts["python"]),
            ("os", facts["os"]),
            ("cpu", f"{cpu['cores']} cores, {cpu['capability']}"),
            ("driver", cuda["driver"] or "unknown"),
            *(("gpu" if i == 0 else "", gpu) for i, gpu in enumerate(gpus)),
            ("packages", ", ".join(f"{name} {version or '-'}" for name, version in facts["packages"].items())),
            ("environment", " ".join(f"{key}={value}" for key, value in facts["environment"].items()) or "-"),
        ]
        text = [f"{name:<12} {value}" for name, value in lines]
        text += ["", "Settings of torch that decide which kernels run, in a new process:"]
        return "\n".join([*text, *(f"  {name}: {value}" for name, value in facts["settings"].items())])


def _cuda() -> dict[str, Any]:
    """Return the devices, or why there are none. No fault of theirs ends the report. Starts no process."""
    gpus, why_not, driver = [], None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error repeats torch's warning of an old driver
        try:
            torch.cuda.init()
            for found in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
                capability = f"{found.major}.{found.minor}"
                facts = {"name": found.name, "capability": capability, "memory_bytes": found.total_memory}
                gpus.append({**facts, "multiprocessors": found.multi_processor_count})
        except (AssertionError, RuntimeError) as error:  # AssertionError: this torch was built without CUDA
            why_not = (str(error).splitlines() or [type(error).__name__])[0]
    with suppress(OSError):  # a file of Linux
        if match := re.search(r"\d+\.\d[\d.]*", _DRIVER.read_text()):
            driver = match[0]
    return {"available": bool(gpus), "why_not": why_not, "driver": driver, "gpus": gpus}
