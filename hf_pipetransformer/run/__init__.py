"""One `train()` of a pipeline: what is set up before its first step, its steps, its checkpoints and its records."""
