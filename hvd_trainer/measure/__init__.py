"""Run a job for the tools, see what it does in each of its ranks, and tell what they conclude of it.

command.py, start.py, own_files.py, machine.py
                a tool's words, and a run of the job that leaves neither files nor processes behind
trials.py, measured.py, failure_reason.py
                interleaved runs, their records, and why one failed
figures.py, equal_work.py, stats.py
                what a run measured, the refusal of unequal work, and the interval of a ratio
stale.py, report.py
                what makes a run stale, and the report of a tool

message.py      what a tool asks a job to record, in one environment variable
trainer.py      tells the listeners of a job on the Trainer what its loop does
script.py, events.py
                tell those of any other script, by PyTorch's hooks
listener.py, recorders.py
                what all are told, and which of them record a rank
steps.py, stacks.py, trace.py
                the recorders: times of steps, sampled stacks, what the first steps compute
"""
