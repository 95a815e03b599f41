"""`compare`: a job on both engines, in rounds.

trials.py -> cli.py runs them -> equal_work.py refuses unequal work -> result.py -> report.py, plots.py, page.py
"""
