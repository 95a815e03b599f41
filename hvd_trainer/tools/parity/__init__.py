"""`parity`: what a job computes on both engines, step by step.

runs.py -> trace.py -> pair.py, gap.py: where they differ -> case.py, causes*.py: why -> report.py
"""
