"""`compare`: a job on both engines, on several numbers of ranks, with several values of its options.

plan.py: what is run -> cli.py runs it -> ../../measure/equal_work.py refuses unequal work
-> result.py: what the figures say -> choice.py: what to type -> report.py, plots.py: how it is shown, by
../../measure/report.py
"""
