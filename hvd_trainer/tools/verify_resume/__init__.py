"""`verify-resume`: campaign.py kills a script again and again, and compares what it has trained."""
