"""Training drafters: the target writes answers (`answers.py`, `sampler.py`), a drafter learns to foresee them.

corpus  = prompts and the target's own answers                       corpus.py
target  = the frozen target over padded batches: features, teacher   target.py
recipe  = a method's network, loss and acceptance on a batch         medusa.py eagle3.py dflash.py draft.py
train() = optimizer, schedule, checkpoints, early stop               trainer.py
report  = acceptance per position on held-out prompts, curves        report.py
"""
