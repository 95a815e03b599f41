"""`hvd-trainer migrate`: rewrite a script for `horovod.torch` into one for torch.distributed and DDP."""
