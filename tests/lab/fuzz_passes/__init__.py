"""Random programs through each pass of coremltools' default pipeline, compared on the reference runtime."""
