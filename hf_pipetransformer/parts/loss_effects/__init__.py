"""Brings to all stages what the user's loss and `log` do to the trainer on the last one."""
