"""Model parallelism: one model in parts, over ranks or over the devices of a rank.

The engines in `backends/`, of which `ddp.py` stands parallel to Horovod's, are about data parallelism.
"""
