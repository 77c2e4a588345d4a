"""The default planner: surplus work in strips over ranks with room, then local search."""
