"""The training's data: numbered batches, of which each pipeline takes its slice."""
