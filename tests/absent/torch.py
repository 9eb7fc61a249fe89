"""Takes the place of torch in processes of tests that need none: coremltools would import it, for seconds."""

raise ImportError("torch is hidden by tests/absent", name="torch")
