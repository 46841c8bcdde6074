"""What users say about drafting: `speculative_config`, the options of each method, and the choice of one request."""
