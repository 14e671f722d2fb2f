"""Forecasts of a training without launching it, and inspection of models from their configuration."""
