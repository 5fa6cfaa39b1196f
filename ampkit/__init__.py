"""Mixed-precision training steps at the speed of the GPU, and bitwise the same steps."""

from . import debug as debug
from ._buckets import Buckets as Buckets
from ._callables import make_graphed_callables as make_graphed_callables
from ._engine import GraphReport as GraphReport
from ._engine import Report as Report
from ._errors import AmpkitError as AmpkitError
from ._errors import AmpkitWarning as AmpkitWarning
from ._errors import CaptureError as CaptureError
from ._errors import CaptureWarning as CaptureWarning
from ._errors import InputMismatch as InputMismatch
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._function import custom_bwd as custom_bwd
from ._function import custom_fwd as custom_fwd
from ._graphed import GraphedFunction as GraphedFunction
from ._graphed import graphed as graphed
from ._op_table import OpTable as OpTable
from ._op_table import op_table as op_table
from ._policy import Policy as Policy
from ._prefetch import prefetch as prefetch
from ._recipe import StepOutput as StepOutput
from ._scaler import GradScaler as GradScaler
from ._scaler import ScalerStats as ScalerStats
from ._step import GraphedStep as GraphedStep
from ._step import graphed_step as graphed_step

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
    "InputMismatch",
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
