"""A model taken apart: its layers found, run in ranges, frozen; its loss. Knows no process."""
