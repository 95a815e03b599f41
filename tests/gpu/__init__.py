"""`make gpu-test`: what this package promises of GPUs, proved on this machine's (see docs/gpu.md)."""
