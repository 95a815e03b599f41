"""The commands that check, compare and measure training jobs (`cli.py` has the list)."""
