"""The tree of exceptions and warnings. Catch `AmpkitError` to catch them all."""


class AmpkitError(Exception):
    """Base class of every exception that ampkit raises on purpose, `ValueError` for a wrong argument aside."""


class CaptureError(AmpkitError, RuntimeError):
    """A step cannot be captured as a CUDA graph. The message names the line of the user's code and what to change."""


class InputMismatch(AmpkitError, ValueError):  # noqa: N818 - says more than InputError would
    """A batch does not fit the step: wrong device, wrong layout, or a leaf that no graph can take."""


class NonfiniteError(AmpkitError, FloatingPointError):
    """A gradient was inf or nan, and training has stopped before it changed a weight (`nonfinite="stop"`)."""


class UsageError(AmpkitError, ValueError):
    """A command of `python -m ampkit` was given what it cannot use. The message says what to write instead."""


class AmpkitWarning(UserWarning):
    """Base class of every warning that ampkit issues."""


class CaptureWarning(AmpkitWarning):
    """Training goes on, but eagerly: the step was not captured. The message says why."""
