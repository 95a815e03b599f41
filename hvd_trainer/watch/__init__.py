"""Each rank's watch over the others: who failed, in which step and phase, said once; and nobody left hanging.

A thread in each rank keeps a line to rank 0. A line that breaks is a rank that has ended, known in
milliseconds; each says once a second what it is doing, so that a rank that is stopped or stuck is found too.

    rank 1 --- beats, "I raised ..." --->  rank 0: collects, decides (judge.py), prints the report (failure.py)
    rank 2 --->           <--- "give your stacks", "end" ---

If rank 0 is the one that fails, rank 1 says so. Neither engine does any of it: Horovod's stall check ended nothing
when a rank was stuck, and a rank that leaves with code 0 is blamed on another.
"""

from hvd_trainer.watch.activity import Activity
from hvd_trainer.watch.hub import Hub
from hvd_trainer.watch.spoke import Spoke
from hvd_trainer.watch.station import Station, Verdict

__all__ = ["Activity", "Hub", "Spoke", "Station", "Verdict"]
