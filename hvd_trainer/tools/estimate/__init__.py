"""`estimate`: a job on hosts that nobody has here, on paper.

model.py -> fit.py, held_out.py -> scope.py -> projection.py -> report.py

published.py and points.py (measured.json) have what the model is fitted to; workload.py has what is estimated.
"""
