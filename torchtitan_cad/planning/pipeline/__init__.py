"""Schedules of a pipeline in ticks, and the core attentions that share a tick."""
