"""Copies changes of the trainer by the user's loss and `log` from the last stage to all stages."""
