"""The version, in one place; read by the packaging, the reports and `--version`."""

__version__ = "0.1.0"
