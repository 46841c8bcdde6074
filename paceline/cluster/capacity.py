"""What one worker can keep up with, by its measured passes."""

from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.worker_spec import WorkerSpec


def capacity(spec: WorkerSpec, prompt: float, output: float, hit_rate: float, gap_s: float | None = None) -> float:
    """Requests per second that one worker can keep up with, at the best number of streams within the gap."""
    time = PrefillTime(spec)
    best = 0.0
    prompt_s = time.prompt_s(max(1, round(prompt * (1 - hit_rate))), round(prompt * hit_rate)).seconds
    for streams in range(1, spec.max_num_seqs + 1):
        pass_s = time.rows_s(streams, 0)
        if gap_s is not None and pass_s > gap_s and best:
            break
        decode_s = output / spec.tokens_per_pass * pass_s / streams
        best = max(best, 1 / (decode_s + prompt_s))
    return best
