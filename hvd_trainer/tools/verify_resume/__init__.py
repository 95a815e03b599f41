"""Kill a training again and again, and prove that nothing was lost.

kills.py: how a run is killed -> cli.py: starts it again -> report.py: what was lost
"""
