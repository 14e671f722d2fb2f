"""Engines: each runs the steps of a layout in its own way; `dispatch` has the list of them."""
