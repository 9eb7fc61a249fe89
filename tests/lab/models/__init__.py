"""Builders of the PyTorch models and programs that the tests convert. Importing this package imports no torch."""
