"""`grid`: a job in many configurations.

configurations.py -> cli.py runs them -> rows.py, prediction.py -> report.py, heat_map.py
"""
