"""See what a script does that is not built on the Trainer, in each of its ranks.

options.py: what to record -> install.py: the listeners, such as step_times.py <- script_events.py calls them
"""
