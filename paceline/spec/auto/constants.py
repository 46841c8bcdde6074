"""All choices of `auto`. Each line says what it is and what happens at half and at twice of it; docs/auto.md says more.

Nothing here depends on a machine, a model or a drafter: those are measured.
"""

PASSAGE = 12  # steps after which half is forgotten of what a passage of text shows. Half: jitters; twice: lags
LASTING = 256  # likewise of what holds for all texts. Half: tries what failed more often; twice: less often
SHARE = 0.005  # of the run's time that finding out may lose. Half: finds changes later; twice: costs as much more
START = 4  # plain steps of one request that may be lost at the start. Half: begins to draft later; twice: loses more
FIRST_SPREAD = 0.5  # tokens by which an unknown gain may differ from none. Half: slow to try; twice: tries the hopeless
TRIED = 4  # steps and requests of one trial of a drafter that is to be told of passes. Half: unsure; twice: expensive
PLAN_EVERY = 4  # steps from one plan of whom to ask to the next. Half: more time; twice: lags
FEW_NODES = 12  # x (1 - row price): asked for where drafts brought little. Half: misses copies; twice: more time
WORTHWHILE = (
    0.02  # tokens per request that a trial must be able to gain. Half: more trials for little; twice: misses more
)
