"""Training drafters: the target writes answers, a drafter learns to predict them.

corpus  = prompts and the target's own answers                       corpus.py (written by the engine, or sampler.py)
target  = the frozen target over padded batches: features, teacher   target.py
recipe  = a method's network, loss and acceptance on a batch         medusa.py eagle.py eagle3.py dflash.py draft.py
Trainer = optimizer, schedule, checkpoints, early stop               trainer.py
run     = from a corpus to a drafter's file and its report; pools    run.py
"""
