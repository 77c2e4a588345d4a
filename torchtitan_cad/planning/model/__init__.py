"""Inputs and results of planning: layouts, tasks, bytes, costs, limits and options."""
