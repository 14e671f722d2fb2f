"""Processes that watch one another: when one dies or hangs, the others say which, and exit."""
