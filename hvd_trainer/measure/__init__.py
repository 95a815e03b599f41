"""What the tools share that measure a job: intervals, what makes a run stale, and the report."""
