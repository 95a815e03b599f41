"""`compare`: a job on both engines, on several numbers of ranks, with several values of its options.

variants.py -> trials.py: what is run
cli.py runs it -> ../runner/equal_work.py refuses unequal work -> result.py, prediction.py: what the figures say
report.py, plots.py, heat_map.py, page.html.j2: how it is shown
"""
