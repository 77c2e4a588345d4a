"""Placement: which rank should hold which tokens of a batch."""
