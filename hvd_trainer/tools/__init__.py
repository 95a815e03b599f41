"""The commands that check, compare, measure and tune training jobs (`cli.py` has the list)."""
