"""Takes the place of transformers in processes of tests that need none: coremltools would import it, for seconds."""

raise ImportError("transformers is hidden by tests/absent", name="transformers")
