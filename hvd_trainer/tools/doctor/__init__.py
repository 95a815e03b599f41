"""`doctor`: this machine, in checks that run side by side.

context.py, torch_facts.py: what the checks go by -> software.py, gpus.py, ... yield findings -> report.py
all_reduce.py: two ranks on each engine
"""
