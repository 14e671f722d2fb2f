"""Planning: costs and times of the units, their split into stages, and the layout on the ranks."""
