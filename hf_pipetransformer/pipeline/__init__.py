"""A running pipeline: processes, stages, schedules, moving weights between ranks, and data."""
