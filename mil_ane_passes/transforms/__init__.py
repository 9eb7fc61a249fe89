"""Transforms: whole-model changes on pymil that may alter the interface, on request.

`contract.py` defines a transform, the draft that it changes, and how changes of the interface are declared; README.md
is its page. The other modules hold one transform each, with what it needs.
"""
