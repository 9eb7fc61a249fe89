"""coremltools' own op tests, unmodified, with predictions made by the reference runtime.

`python -m tests.lab.upstream` runs them all; see `python -m tests.lab.upstream --help`.
"""
