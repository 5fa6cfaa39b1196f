"""What an engine calls and captures of a user's function: all of it, or its declared modules one by one."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ..._capture.engine.options import Options
from ..._capture.engine.session import Session
from ..._capture.ranks.ranks import Ranks
from ..step_function import StepFunction
from .split import COMPILES, StepSplitter
from .split_update import WithinFunction


def session_of_function(
    function: StepFunction,
    device: torch.device,
    options: Options,
    ranks: Ranks,
    blocker: str,
    eager: Mapping[type[nn.Module], str],
    *,
    compiles: bool,
) -> Session:
    """Return the session of a function. In parts, modules of the classes `eager` are not captured.

    `blocker` says why it cannot be captured as a whole, `compiles` whether its modules are compiled.
    """
    why_never = COMPILES if compiles else "" if function.modules else _NONE_DECLARED
    update, named = WithinFunction(), function.named_modules
    return Session(
        fn=function,
        captured=function,
        state=function.state,
        device=device,
        options=options,
        ranks=ranks,
        blocker=blocker,
        name=function.name,
        take_in=partial(function.take_in, device),
        untimed=2 if compiles else 1,
        splitter=StepSplitter(function, named, update, options, ranks, device, why_never=why_never, eager=eager),
    )


_NONE_DECLARED = "modules=() declares no module that could be captured by itself. Pass those that the function calls"
