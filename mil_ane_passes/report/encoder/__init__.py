"""The page that says how to call an adapted encoder."""
