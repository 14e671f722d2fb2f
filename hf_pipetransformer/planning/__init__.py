"""Planning of what runs on which rank: costs and times of the units, the split into stages, the layout."""
