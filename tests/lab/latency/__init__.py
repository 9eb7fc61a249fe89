"""The latency model against public measurements: the fit of its parameters, and the errors on rows held out of it."""
