"""See what a script does that is not built on the Trainer, in each of its ranks.

options.py: what to record -> install.py: the listeners -> script_events.py, which calls them -> step_times.py
"""
