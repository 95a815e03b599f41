"""A device without hardware, on which what is true of GPUs alone is shown (see docs/gpu.md)."""
