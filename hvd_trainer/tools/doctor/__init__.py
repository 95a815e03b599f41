"""Check this machine and the job's other hosts, in checks that run side by side.

context.py: the input of all checks -> software.py, gpus.py, ... yield findings -> report.py
all_reduce.py: two ranks on each engine
"""
