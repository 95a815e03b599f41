"""Compare what a job computes on both engines, step by step.

traced_runs.py -> traces.py -> comparison.py, tensors.py: where they differ -> causes.py: why -> report.py
"""
