"""Models of other converters than coremltools' own: JAX through stablehlo-coreml, ONNX through onnx2coreml."""
