"""What people bring to a trainer, row by row, on each library: ``python -m benchmarks.idioms --help``."""
