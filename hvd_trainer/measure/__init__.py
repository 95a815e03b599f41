"""See what a job does, in each of its ranks, for the tools; and what the tools conclude of it.

message.py      what a tool asks a job to record, in one environment variable
trainer.py      the listeners of a job on the Trainer  \\
script.py       the listeners of any other script       > one set of recorders, one format
events.py       what PyTorch's hooks tell of a script  /
steps.py, stacks.py, trace_format.py
                the recorders: times of steps, sampled stacks, what the first steps compute
stats.py, code.py, report.py
                the interval of a ratio, what makes a run stale, and the report of a tool
"""
