"""What an engine and the objects that work for it share: the function, its options, and what is known of its graphs."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..._errors import CaptureWarning
from ..._user_line import WarnOnce
from ..graph.cache import Cache
from ..graph.graph import capture_stream
from ..graph.kernel_names import KernelNames
from ..graph.timing import Clock
from ..host.uploads import Uploads
from ..preflight.undeclared import TakeIn
from ..ranks.ranks import Ranks
from ..state.settings_history import SettingsHistory
from ..state.state import TrainingState
from .fallback import UNMOVED, Fallback, MovableOptimizer
from .layouts import NEVER, Layouts, Splitter
from .options import WARM_UP, Options


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """A function that is called, captured and replayed. What changes with its calls is made once, when it is needed.

    Attributes:
        fn: `fn(phase, *args, **kwargs)`, a function of tensors that changes only `state`. It returns a tree of tensors
            and constants; the constants are the same in every call of a key.
        captured: what a graph records: `fn`, or something that leaves the same bits.
        state: what `fn` may change.
        device: where the inputs must be.
        options: see `Options`.
        ranks: the processes that must decide alike.
        name: what messages call it.
        blocker: why `fn` cannot be captured, if that is known already; else "".
        whole: what is called once nothing is captured any more, in place of `fn`. It does what the caller would do
            behind `fn`, too, and its outputs belong to the caller. None: `fn`, whose outputs are copied.
        optimizer: where the optimizer steps, if that may be behind `fn`.
        watching: returns a context for the call of `fn` that runs under the preflight.
        declared: whether the user has declared what `fn` may change, so that it may change nothing else.
        take_in: takes optimizers that a call steps beside those of the state, and gradients that it leaves to modules
            that have just come into the state, see `Undeclared`. None: `fn` may train nothing that is not declared.
        one_argument: whether every call has one argument, the batch.
        untimed: how many calls of a layout are slower than later ones, and are not timed.
        splitter: does calls in parts that cannot be captured.
    """

    fn: Callable[..., Any]
    captured: Callable[..., Any]
    state: TrainingState
    device: torch.device
    options: Options
    ranks: Ranks
    name: str
    blocker: str = ""
    whole: Callable[..., Any] | None = None
    optimizer: MovableOptimizer = UNMOVED
    watching: Callable[[], AbstractContextManager[Any]] = nullcontext
    declared: bool = False
    take_in: TakeIn | None = None
    one_argument: bool = False
    untimed: int = 1
    splitter: Splitter = NEVER

    @property
    def on_cuda(self) -> bool:
        """Whether graphs are captured, and not emulated."""
        return self.options.graph == "auto" and self.device.type == "cuda"

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """Where graphs are captured; None if they are emulated."""
        return capture_stream(self.device) if self.on_cuda else None

    @functools.cached_property
    def clock(self) -> Clock:
        """Times some of the calls."""
        return Clock(self.device if self.on_cuda else None)

    @functools.cached_property
    def cache(self) -> Cache:
        """The graphs."""
        return Cache(self.options.max_graphs, self.options.memory_budget)

    @functools.cached_property
    def uploads(self) -> Uploads:
        """The constants of the host that the function copies to the device."""
        return Uploads(self.device if self.on_cuda else torch.device("cpu"), self.state.host_tensors)

    @functools.cached_property
    def names(self) -> KernelNames | None:
        """Names of the kernels of the graphs; None without `annotate`."""
        return KernelNames(self.state.modules) if self.options.annotate else None

    @functools.cached_property
    def warmup(self) -> int:
        """How many eager calls come before the capture of a layout."""
        return self.ranks.warm_up(self.options.warmup, self.on_cuda)[0]

    @functools.cached_property
    def layouts(self) -> Layouts:
        """The layouts that have no graph."""
        why_more = self.ranks.warm_up(self.options.warmup, self.on_cuda)[1]
        return Layouts(
            self.warmup,
            lenient=self.device.type == "cpu",
            sees_capture=self.options.capturing is True,
            may_show_capture=self.options.capturing == "auto" and not self.ranks.several,  # each would decide by itself
            names=self.names,
            first_reason=f"{WARM_UP} ({why_more})" if why_more else WARM_UP,
        )

    @functools.cached_property
    def settings_history(self) -> SettingsHistory:
        """What a key has of the settings of a call."""
        return SettingsHistory(self.state)

    @functools.cached_property
    def fallback(self) -> Fallback:
        """Says that calls are eager."""
        refused = "graph='off'" if self.options.graph == "off" else ""
        return Fallback(self.name, WarnOnce(self.name, CaptureWarning), self.options.on_failure == "raise", refused)
