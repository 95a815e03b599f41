"""`compare`: a job on both engines, in rounds.

plan.py -> tool.py runs it -> work.py refuses unequal work -> result.py -> report.py, plots.py, page.py
"""
