"""Edits of existing packages at the level of the file: no program is built, what an edit does not touch stays as it is.

`document.py` and `program_parts.py` hold a model file in pieces that keep their own bytes, `description.py` what the
model says of its inputs and outputs, `uses.py` what needs what. Each edit is one file; `contract.py` says what an edit
is, and in which order edits that are asked for together are made.
"""
