"""`--profile`: what every rank does in a few steps, as one trace and as a table.

    rank 0   skip ... | profiler's warm-up | step 7 | step 8 | ... | step 16 |  writes, merges | goes on
    rank 1   skip ... | profiler's warm-up | step 7 | step 8 | ... | step 16 |  writes         | goes on

Each rank records itself with `torch.profiler` (`recorder.py`), and the phases of its steps (`phases.py`). The
clocks of all are compared (`clocks.py`), each rank writes its trace on rank 0's clock (`trace.py`), and rank 0
puts them into one file (`merge.py`) and says where the time went (`breakdown.py`).
"""

from hvd_trainer.profile.callback import Profile

__all__ = ["Profile"]
