"""Loads models lazily: the weights stay in the checkpoint until they are distributed."""
