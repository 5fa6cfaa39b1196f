"""Mixed-precision training steps at the speed of the GPU, and bitwise the same steps."""

import importlib as _importlib
import typing as _typing

from ._batches.buckets import Buckets as Buckets
from ._batches.prefetch import prefetch as prefetch
from ._callables.graphed_callable import make_graphed_callables as make_graphed_callables
from ._capture.graph.report import GraphReport as GraphReport
from ._capture.graph.report import Report as Report
from ._capture.host.constants import HostConstant as HostConstant
from ._capture.host.constants import HostConstants as HostConstants
from ._errors import AmpkitError as AmpkitError
from ._errors import AmpkitWarning as AmpkitWarning
from ._errors import CaptureError as CaptureError
from ._errors import CaptureWarning as CaptureWarning
from ._errors import InputMismatch as InputMismatch
from ._errors import NonfiniteError as NonfiniteError
from ._optimizer.scaler import GradScaler as GradScaler
from ._optimizer.scaler import ScalerStats as ScalerStats
from ._precision.custom_function import custom_bwd as custom_bwd
from ._precision.custom_function import custom_fwd as custom_fwd
from ._precision.explain import Explanation as Explanation
from ._precision.explain import explain as explain
from ._precision.op_table import OpTable as OpTable
from ._precision.op_table import op_table as op_table
from ._precision.policy import Policy as Policy
from ._step.graphed import GraphedFunction as GraphedFunction
from ._step.graphed import graphed as graphed
from ._step.graphed_step import graphed_step as graphed_step
from ._step.step_calls import GraphedStep as GraphedStep
from ._step.training_step import StepOutput as StepOutput

__version__ = "0.1.0"
__all__ = [
    "AmpkitError",
    "AmpkitWarning",
    "Buckets",
    "CaptureError",
    "CaptureWarning",
    "Explanation",
    "GradScaler",
    "GraphReport",
    "GraphedFunction",
    "GraphedStep",
    "HostConstant",
    "HostConstants",
    "InputMismatch",
    "NonfiniteError",
    "OpTable",
    "Policy",
    "Report",
    "ScalerStats",
    "StepOutput",
    "custom_bwd",
    "custom_fwd",
    "debug",
    "explain",
    "graphed",
    "graphed_step",
    "make_graphed_callables",
    "op_table",
    "prefetch",
]

if _typing.TYPE_CHECKING:
    from . import debug as debug
else:  # a type checker would take every name for one of ampkit

    def __getattr__(name: str) -> object:
        """Import `ampkit.debug`, `lightning` or `transformers` when it is first asked for: most programs never do."""
        if name in ("debug", "lightning", "transformers"):
            return _importlib.import_module(f"ampkit.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
