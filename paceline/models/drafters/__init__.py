"""Networks of the trained drafters. One file each; `layers.py` has what they share, `paged.py` runs them in the engine.

| file        | network                                                                 | drafts with            |
|-------------|-------------------------------------------------------------------------|------------------------|
| medusa.py   | residual heads on the target's last hidden state                        | no attention, no KV    |
| eagle.py    | EAGLE-1 and 2: predicts the target's last hidden state, the target's head | its own KV             |
| eagle3.py   | EAGLE-3: three fused features, a head over a draft vocabulary           | its own KV             |
| dflash.py   | DFlash: a block of masks filled at once, attending to fused features    | KV of the context only |
| distilled.py| a small Llama made of a few of the target's layers                      | its own KV             |

`store.py` is our file format, `formats.py` (with `eagle_format.py` and `checkpoint.py`) reads what others publish,
`export.py` writes it, `load.py` chooses.
"""
