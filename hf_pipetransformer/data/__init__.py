"""The training data: numbered global batches, of which each pipeline takes its slice."""
