"""`doctor`: this machine, in checks that run side by side.

situation.py, probe.py: what the checks go by -> software.py, gpus.py, ... yield findings -> report.py
proof.py: two ranks on each engine
"""
