"""What a colleague with a Mac runs; `measure.py` is copied, it is no part of the package and imports none of it."""
