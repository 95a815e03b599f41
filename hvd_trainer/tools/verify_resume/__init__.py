"""`verify-resume`: audit_job.py is killed again and again, at moments that kill.py finds."""
