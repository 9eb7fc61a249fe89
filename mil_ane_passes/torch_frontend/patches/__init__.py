"""One file a patch; `PATCH` in each."""
