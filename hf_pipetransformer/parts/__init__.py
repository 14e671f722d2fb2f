"""Capabilities of a training, each in a folder of its own: what a run can do besides training a pipeline."""
