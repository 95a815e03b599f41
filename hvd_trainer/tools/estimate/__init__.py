"""Estimate how a job scales on hosts that are not here, by a formula fitted to measured steps.

model.py -> fit.py, held_out.py -> projection.py -> report.py

points.py reads the points that the model is fitted to (published.json, measured.json); job.py has the job.
"""
