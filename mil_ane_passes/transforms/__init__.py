"""Transforms: whole-model changes on pymil that may alter the interface, on request.

`contract.py` defines a transform, the draft that it changes, and the declaration of interface changes. README.md
describes both. Each other module contains one transform, with the functions that only this transform needs.
"""
