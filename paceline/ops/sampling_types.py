"""Array types of the host's sampling code.

The host works in numpy, but for draws from whole rows, which are native; one row at a time and on one thread: a row is
too small to be worth starting other threads for, and waiting for them is what costs on a busy machine."""

import numpy as np
import numpy.typing as npt

FloatRow = npt.NDArray[np.float32]  # [vocab] or [candidates]: logits, scores, noise
IdRow = npt.NDArray[np.int64]  # [candidates]: token ids, ascending
Probs = npt.NDArray[np.float64]  # [vocab]: a distribution, or what is left of one
Mask = npt.NDArray[np.bool_]  # [candidates]: which of them
