"""The on-disk cache of frozen layers' outputs: keys, store, and the check whether caching is safe for a model."""
