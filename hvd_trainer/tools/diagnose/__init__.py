"""`diagnose`: sample a job's stacks, run it with parts left out where they tell too little, and name the causes.

cli.py runs the job -> profile.py: seconds by role and line; machine_use.py: what else was at work -> causes.py ->
actions.py: the advice -> report.py; flame_graph.py: the page's drawings; speedscope.py: a file with the stacks
"""
