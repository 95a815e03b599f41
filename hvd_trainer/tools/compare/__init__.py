"""`compare`: a job on both engines, on several numbers of ranks, with several values of its options, or a search.

plan.py: what is run -> cli.py runs it -> ../../measure/equal_work.py refuses unequal work
-> result.py: what the figures say -> report.py, plots.py: how it is shown, by ../../measure/report.py

--search: settings.py: candidates -> search.py: the next runs, as race.py decides -> search_job.py runs the job
-> search_report.py
"""
