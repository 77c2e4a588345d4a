"""What is to be planned: layouts, tasks, bytes, costs, limits and options."""
