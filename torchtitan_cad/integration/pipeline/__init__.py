"""Pipeline schedules in ticks."""
