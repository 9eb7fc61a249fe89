"""Commands: one module a command, with its options, its public function, its command line and its report.

A new option is a field of the command's options dataclass: flags, Python keywords and batch settings follow from it.
Command modules import coremltools only when a command runs.
"""
