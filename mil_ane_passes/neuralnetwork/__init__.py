"""Models of the older format, `.mlmodel` (NeuralNetwork): read, and converted to ML Programs."""
