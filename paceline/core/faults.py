"""Whether an exception concerns one request or the whole engine."""

import torch

from paceline.errors import RequestFailedError

# What is not about one request: memory that ran out, and a process that was told to stop.
_EVERYBODYS = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


def request_error(what: str, error: BaseException) -> RequestFailedError:
    """The error that ends one request after its own `what` failed; raises `error` again where it concerns all.

    Takes any `BaseException`: libraries written in Rust, such as tokenizers, raise one of their own when they panic."""
    if isinstance(error, _EVERYBODYS):
        raise error
    if isinstance(error, RequestFailedError):
        return error
    failed = RequestFailedError(f"{what} failed: {error!r}. This request ends here; others go on")
    failed.__cause__ = error
    return failed
