"""Refuses optimizers, hooks and settings that would differ between the stages of a pipeline."""
