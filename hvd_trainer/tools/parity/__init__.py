"""Compare what a job computes on both engines, step by step.

traced_runs.py -> traces.py -> findings.py, tensors.py: where they differ -> causes.py: why -> pair.py -> report.py
"""
