"""Estimate how a job scales on hosts that are not here, by a formula fitted to measured steps.

model.py -> fit.py, held_out.py -> scope.py -> projection.py -> report.py

published.py and points.py (measured.json) have the points that the model is fitted to; workload.py has the job.
"""
