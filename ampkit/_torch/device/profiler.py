"""Whether torch's profiler is recording, which torch says under a private name only."""

from collections.abc import Callable

import torch

from ..guard import private

# profiler_enabled(): whether a profiler records this thread. A second one would end the first.
profiler_enabled: Callable[[], bool] = private(torch._C._autograd, "_profiler_enabled")
