"""`verify-resume`: audit.py kills audit_job.py in every phase; script.py kills a script; both by injector.py."""
