"""Model parallelism: one model in parts, over ranks or over the devices of a rank.

Data parallelism is the subject of `hvd_trainer.backends`.
"""
