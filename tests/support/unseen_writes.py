"""A kernel of Triton's, which writes to memory where no mode sees it."""

import triton
import triton.language as tl


@triton.jit
def tell_whether_late(flag, calls):  # type: ignore[no-untyped-def]  # Triton reads the annotations
    tl.store(flag, (tl.load(calls) > 10.0).to(tl.int32))
