"""Training speed, measured side by side: ``python -m benchmarks --help``. See README.md here."""
