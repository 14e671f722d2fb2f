"""What is frozen and fed by the batch alone is computed once for each sample, and read afterwards."""
