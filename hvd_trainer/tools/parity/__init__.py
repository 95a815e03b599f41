"""Compare what a job computes on both engines, step by step.

traced_runs.py -> traces.py -> pair.py, distance.py: where they differ -> case.py, causes.py: why -> report.py
"""
