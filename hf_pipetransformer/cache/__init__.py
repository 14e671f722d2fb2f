"""What frozen layers give, kept on disk: keys, store, and whether it may be kept."""
