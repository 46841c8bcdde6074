"""For how many requests work on the device is captured: any other number is padded to the next of these."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # requests of a graph


def largest_bucket(max_num_seqs: int | None) -> int:
    """Requests of the largest graph where never more than so many run; more are drafted for in turns."""
    return next((size for size in BUCKETS if max_num_seqs is not None and size >= max_num_seqs), BUCKETS[-1])
