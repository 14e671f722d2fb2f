"""One `train()` of a pipeline: setup before the first step, training steps, checkpoints and records."""
