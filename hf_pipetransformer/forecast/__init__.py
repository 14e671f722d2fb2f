"""A training predicted without launching it, and models looked at by their configuration."""
