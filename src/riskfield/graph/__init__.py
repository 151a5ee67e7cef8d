"""Structure: factor graphs, builders, schedules."""
