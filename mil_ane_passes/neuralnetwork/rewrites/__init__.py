"""Rewrites of NeuralNetwork layers within the format: one function each, found in the modules of this folder.

A function is registered with `rewrite_layer` and called for each layer of its kinds. It returns the layers that replace
it (`Replacement`), the reason why it does not rewrite a layer that has its problem (a string), or None for a layer that
has not.
"""
