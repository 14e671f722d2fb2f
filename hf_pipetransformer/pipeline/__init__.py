"""A running pipeline: processes, stages, schedules, weights that move, data."""
