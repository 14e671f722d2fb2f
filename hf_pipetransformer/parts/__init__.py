"""Optional capabilities of a training, each in a folder of its own."""
