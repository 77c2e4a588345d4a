"""Metrics, summary and pictures of a run."""
