"""Engines: each runs the steps of a plan in its own way; `dispatch` has the list of them."""
