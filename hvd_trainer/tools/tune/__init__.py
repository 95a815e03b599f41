"""`tune`: find the fastest settings of each engine for a job.

settings.py: candidates -> search.py: the next runs, as race.py decides -> cli.py runs the job -> report.py
"""
