"""Estimate how a job scales on hosts that are not here, by a formula fitted to measured steps.

model.py -> fit.py, held_out.py -> scope.py -> projection.py -> report.py

published.py and points.py read the points that the model is fitted to (published.json, measured.json);
workload.py has the job.
"""
