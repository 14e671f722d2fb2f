"""The training data: numbered global batches. Each pipeline takes its slice."""
