"""User losses that call the model themselves, and thereby drive the pipeline."""
