"""Models of the older format, `.mlmodel` (NeuralNetwork): reading and conversion to ML Programs."""
