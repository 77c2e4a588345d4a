"""A verdict on a machine with one GPU: tests, speeds and goals, each part in a process of its own (docs/performance.md)."""
