"""Frozen modules that the loss calls, such as a teacher, are computed in the first epoch and read in the others."""
