"""`verify-resume`: cli.py plans kills of audit_job.py, injector.py carries them out, cli.py compares the runs."""
