"""A job that is asked to end (SIGTERM) saves a checkpoint at the same step on all processes."""
