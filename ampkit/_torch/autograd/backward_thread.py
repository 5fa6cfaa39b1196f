"""The thread in which a step's backward passes run: the one that calls them, on CUDA as on a CPU."""

from ..._undo import Undo
from ..tensors.modes import let_autograd_use_threads, uses_autograd_threads


def run_backwards_here(undo: Undo) -> None:
    """Until the end of a context, run backward passes that this thread begins in it, and not in threads of autograd's.

    On CUDA torch has a thread for each device, of which three things depend that a step and its replays must share.

    Autograd runs the newest node first, by numbers that each thread counts for itself. So the order in which gradients
    of gradients are added up, and with it their last bits, would depend on all that the process has done before in
    either thread (csrc/autograd/engine.h, CompareNodeTaskTime).

    cuDNN's benchmark keeps its choices for each thread (ATen/native/cudnn/Conv_v8.cpp), and one may have chosen other
    kernels than another one.

    Python's profile functions, and what is noted of a call here, belong to a thread. What a hook on a gradient reads or
    writes on the host would not be seen.
    """
    undo.note(let_autograd_use_threads, uses_autograd_threads())
    let_autograd_use_threads(False)
