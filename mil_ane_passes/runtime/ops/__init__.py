"""The kernels, one module per op family, named as coremltools names its `ops/defs`."""
