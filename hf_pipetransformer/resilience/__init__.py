"""Nothing lost: whole checkpoints, SIGTERM, and what a job does when one of its processes dies or hangs."""
