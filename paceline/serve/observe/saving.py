"""An estimate of the time that speculation saved, from the steps themselves.

A decode step's cost is learned as steps go by (lab/live_pass_cost.py), so the cost of the plain step that was *not*
taken is known:

    saved = tokens emitted / sequences x (a plain step of so many sequences)   what plain steps would have taken
            - the step's own time, its drafting included

The step's time is shared among its sequences by their rows. Steps with prompt chunks are left out: they are no measure
of decoding.
"""

from paceline.core.step_record import StepRecord
from paceline.lab.live_pass_cost import PassCostModel


class Savings:
    def __init__(self) -> None:
        self._cost = PassCostModel()

    def of_step(self, step: StepRecord) -> dict[str, float]:
        """Seconds that this step saved, by method; takes the step in as an observation."""
        decoding = [record for record in step.passes if record.new_token_ids]
        if not decoding or step.seconds <= 0.0 or any(record.num_prompt_rows for record in step.passes):
            return {}  # nothing to learn from: a clock may stand still between two readings
        num_rows, num_sequences = sum(record.num_rows for record in decoding), len(decoding)
        self._cost.observe(num_rows, step.seconds, num_sequences)
        plain_s = self._cost.at(num_sequences, num_sequences)
        saved: dict[str, float] = {}
        for record in decoding:
            if len(record.draft):
                gain = len(record.new_token_ids) / num_sequences * plain_s - step.seconds * record.num_rows / num_rows
                saved[record.method] = saved.get(record.method, 0.0) + gain
        return saved
