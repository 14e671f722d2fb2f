"""What happened in a training: its records, and a page made of them."""
