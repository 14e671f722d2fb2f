"""What runs where: costs and times of the units, the split into stages, the plan."""
