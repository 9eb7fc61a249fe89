"""The fast tests on every supported Python, numpy and coremltools."""
