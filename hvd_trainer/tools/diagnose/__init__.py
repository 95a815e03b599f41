"""`diagnose`: run a job with parts of it left out, and conclude what each part costs.

cli.py runs the job -> causes.py: the cost of each cause -> actions.py: the advice -> report.py
"""
