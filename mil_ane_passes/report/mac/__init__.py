"""The script for a user with a Mac. `measure.py` is copied there; it imports nothing of this package."""
