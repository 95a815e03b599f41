"""`tune`: which settings of an engine are the fastest here, for a job.

settings.py: what can be changed -> search.py: what is run next, as race.py judges -> cli.py runs it -> report.py
"""
