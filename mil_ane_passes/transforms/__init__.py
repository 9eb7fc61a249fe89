"""Edits of existing packages at the level of the file: unedited parts keep their bytes.

`document.py` and `program_parts.py` hold a model file in pieces that keep their own bytes, `description.py` the
descriptions of inputs and outputs, `uses.py` the dependencies between values. Each edit is one file; `contract.py`
defines the interface of edits, and applies several edits in order.
"""
