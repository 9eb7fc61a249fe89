"""Experiments on the correctness of the whole: planted errors and random programs."""
