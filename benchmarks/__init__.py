"""Training speed, measured side by side: ``python -m benchmarks --help``. See README.md here."""

NO_GPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    # An empty list of AMD's GPUs is taken as no list.
    "HIP_VISIBLE_DEVICES": "-1",
    # Intel's GPUs: only CPUs are left.
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
"""Environment variables that hide all GPUs from a process that has not looked for them yet."""
