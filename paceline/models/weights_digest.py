"""Which weights a model has, whatever it is called and wherever it lies: a digest of its files' content."""

import hashlib
from pathlib import Path

from paceline.models.checksums import sha256_of
from paceline.models.packed_cache import weight_files


def weights_digest(path: Path) -> str:
    """Reads all of the model's files: about a second per gigabyte. Empty where there are none."""
    files = [path] if path.is_file() else sorted(file for file in weight_files(path) if file.is_file())
    if not files:
        return ""
    return hashlib.sha256("".join(sha256_of(file) for file in files).encode()).hexdigest()
