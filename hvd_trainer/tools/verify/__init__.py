"""`verify-resume`: job.py is killed again and again, at moments that hunt.py finds."""
