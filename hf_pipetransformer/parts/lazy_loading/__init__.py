"""Loads models whose weights stay in their checkpoint until they are distributed."""
