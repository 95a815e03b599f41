"""Run a script that was written for Horovod or for torch.distributed on either engine, as it is."""
