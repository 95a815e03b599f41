"""`grid`: a job in many configurations.

plan.py -> tool.py runs it -> rows.py, prediction.py -> report.py, picture.py
"""
