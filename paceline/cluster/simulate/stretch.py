"""Passes that do the same, one after another, as one event; how long each takes may change while they run."""

from dataclasses import dataclass, field

from paceline.cluster.simulate.job import Job
from paceline.cluster.worker_spec import DECODES, READS


@dataclass(slots=True)
class Stretch:
    start_s: float
    pass_s: float  # of a pass of a worker that is alone on its host
    num_passes: int
    rows: list[tuple[Job, int]]  # prompt rows per pass
    num_rows: int  # of a pass, those of streams included
    num_context: int  # tokens before each of these rows, added up
    factor: float = 1.0  # passes take so many times `pass_s` since `since_s`
    since_s: float = field(init=False)
    before: float = 0.0  # passes done before, the one that ran then in part
    _pass_start_s: float = field(init=False)  # of the pass that ran at `since_s`
    _spans: list[tuple[float, int]] = field(default_factory=list)  # of passes that ended: seconds of each, how many

    def __post_init__(self) -> None:
        self.since_s = self._pass_start_s = self.start_s

    @property
    def kind(self) -> str:
        return READS if self.rows else DECODES

    @property
    def now_pass_s(self) -> float:
        return self.pass_s * self.factor

    @property
    def end_s(self) -> float:
        return self.since_s + (self.num_passes - self.before) * self.now_pass_s

    def num_done(self, now: float) -> float:
        """Passes, the one that runs in part: what is done of it stays done when the speed changes."""
        return self.before + (now - self.since_s) / self.now_pass_s

    def go_on(self, now: float, factor: float) -> bool:
        """At this speed from now on; False: at the same as before."""
        if factor == self.factor:
            return False
        self._move(now, min(self.num_done(now), self.num_passes))
        self.factor = factor
        return True

    def ended(self) -> list[tuple[float, int]]:
        """Seconds of each pass and how many took so long, in order; the stretch is over."""
        self._move(self.end_s, self.num_passes)
        return self._spans

    def _move(self, now: float, done: float) -> None:
        count, pass_s = int(done) - int(self.before), self.now_pass_s
        if count:
            left = int(self.before) + 1 - self.before  # of the pass that ran at `since_s`
            first_end_s = self.since_s + left * pass_s
            if left == 1.0 and self._pass_start_s == self.since_s:
                self._spans.append((pass_s, count))
            else:
                self._spans.append((first_end_s - self._pass_start_s, 1))
                if count > 1:
                    self._spans.append((pass_s, count - 1))
            self._pass_start_s = first_end_s + (count - 1) * pass_s
        self.before, self.since_s = done, now
