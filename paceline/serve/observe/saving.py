"""An estimate of the time that speculation saved, from the steps themselves.

A decode step's time is close to a + b x rows: reading the weights costs the same for any number of rows, each row adds
a little. Both are fitted as steps go by (old ones fade), so the cost of the plain step that was *not* taken is known:

    saved = tokens emitted / sequences x (a + b x sequences)   what plain steps would have taken
            - the step's own time, its drafting included

The step's time is shared among its sequences by their rows. Steps with prompt chunks are left out: they are no measure
of decoding.
"""

from paceline.core.step_record import StepRecord

MEMORY = 0.99  # weight that an observation keeps with each newer one: the last hundred steps count


class StepCostModel:
    def __init__(self) -> None:
        # faded sums of 1, rows, seconds, rows^2, rows x seconds
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def saving(self, step: StepRecord) -> dict[str, float]:
        """Seconds that this step saved, by method; takes the step in as an observation."""
        decoding = [record for record in step.passes if record.new_token_ids]
        if not decoding or any(record.num_prompt_rows for record in step.passes):
            return {}
        num_rows = sum(record.num_rows for record in decoding)
        self._observe(num_rows, step.seconds)
        plain_s = self.predict(len(decoding))
        saved: dict[str, float] = {}
        for record in decoding:
            if len(record.draft):
                gain = len(record.new_token_ids) / len(decoding) * plain_s - step.seconds * record.num_rows / num_rows
                saved[record.method] = saved.get(record.method, 0.0) + gain
        return saved

    def predict(self, num_rows: int) -> float:
        """Seconds of a decode step with so many rows."""
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - mean_rows**2
        if variance < 1e-6:  # every step had the same number of rows: there is no slope to know
            return mean_s
        slope = max(0.0, (self._rows_seconds / self._weight - mean_rows * mean_s) / variance)
        return max(0.0, mean_s + slope * (num_rows - mean_rows))

    def _observe(self, num_rows: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._rows = MEMORY * self._rows + num_rows
        self._seconds = MEMORY * self._seconds + seconds
        self._rows_rows = MEMORY * self._rows_rows + num_rows**2
        self._rows_seconds = MEMORY * self._rows_seconds + num_rows * seconds
