"""A loss of the user that calls the model itself, and so drives the pipeline."""
