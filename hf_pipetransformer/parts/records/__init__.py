"""The record of a training: writing its files, and reading them back."""
