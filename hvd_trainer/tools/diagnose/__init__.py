"""`diagnose`: a job with things left out.

cli.py runs it -> causes.py: what each cause costs -> actions.py: what to do about it -> report.py
"""
