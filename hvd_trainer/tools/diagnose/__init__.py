"""`diagnose`: sample a job's stacks, run it with parts left out where they tell too little, and name the causes.

cli.py runs the trials.py -> profile.py: seconds by role (roles.py) and line; machine_use.py: what else was at work
-> causes.py, own_code.py -> actions.py: the advice -> report.py; speedscope.py: the stacks
"""
