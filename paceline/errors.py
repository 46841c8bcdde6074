"""Every error that Paceline raises for its users, in one tree.

Catch `PacelineError` for all of them. Each message says what was wrong, what was given, and what to do.
"""


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""


class InvalidOptionError(PacelineError, ValueError):
    """An option is out of range, unknown, or does not go with another one."""


class MissingExtraError(InvalidOptionError):
    """What was asked for needs a library that is not installed; the message names the extra that brings it."""

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(f"{what} needs {library}: pip install 'paceline[{extra}]'")


class InvalidRequestError(PacelineError, ValueError):
    """This request cannot be served (empty prompt, longer than the context, ...). The engine goes on."""


class ModelLoadError(PacelineError):
    """The model could not be found, fetched or read."""


class UnsupportedModelError(ModelLoadError):
    """The model was read, but its architecture or a feature it asks for is not supported."""


class RequestFailedError(PacelineError, RuntimeError):
    """A running request failed (its logits were not finite, a logits processor raised, ...). Others go on."""


class NothingToSampleError(RequestFailedError):
    """The request's own options left no token to choose, where the model itself gave sound logits."""


class GrammarLimitError(RequestFailedError):
    """What the request's own grammar allows next takes more than a step may: it needs a simpler one."""


class EngineDeadError(PacelineError, RuntimeError):
    """The engine loop stopped on an internal error; the engine must be rebuilt."""
