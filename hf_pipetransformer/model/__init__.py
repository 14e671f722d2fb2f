"""A single model: finding its layers, running ranges of them, freezing them, and its loss. No process groups."""
