"""What a row adds to a pass, learned from all passes: what the scheduler shares out while requests decode.

    seconds of a pass = sum over its rows of (row_s + context_s x context / 1000)

This is a price, not the cost curve of a pass (lab/live_pass_cost.py). The curve is learned from steps that only decode
and knows no contexts; this is learned from prompts too, at any context, and follows the newest pass at once. What a
pass takes whatever its rows are is counted among them, so a row looks a little more expensive than it is.
"""

from dataclasses import dataclass

# How far the newest pass moves the estimate: a machine, or a context, may change from one second to the next.
STEP = 0.5
CONTEXT_UNIT = 1000  # tokens


@dataclass(slots=True)
class RowCost:
    row_s: float | None = None  # None: no pass was seen yet
    context_s: float = 0.0  # for each 1000 tokens of a row's context

    def learn(self, num_rows: int, num_context: int, seconds: float) -> None:
        """A pass of `num_rows` rows whose contexts add up to `num_context` tokens took so long."""
        context = num_context / CONTEXT_UNIT
        if self.row_s is None:
            self.row_s = seconds / num_rows
            return
        # A normalized gradient step: the error is attributed mostly to rows or to context, whichever there was more of.
        error = seconds - self.row_s * num_rows - self.context_s * context
        step = STEP * error / (num_rows**2 + context**2)
        self.row_s = max(0.0, self.row_s + step * num_rows)
        self.context_s = max(0.0, self.context_s + step * context)

    def at(self, context: int) -> float:
        """Seconds of one row after so many tokens."""
        return (self.row_s or 0.0) + self.context_s * context / CONTEXT_UNIT

    def rows_within(self, seconds: float, context: int, most: int) -> int:
        """How many rows after `context` tokens take no longer than `seconds`, at most `most`."""
        return most if seconds >= most * self.at(context + most // 2) else int(seconds / self.at(context + most // 2))
