"""Check this machine and the job's other hosts, in checks that run side by side.

context.py: the input of all checks -> software.py, gpus.py, ... yield findings, which findings.py prints
all_reduce.py: two ranks on each engine
"""
