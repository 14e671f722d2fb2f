"""Layer freezing: the policies, the callback that applies them, and its use in a plain `transformers.Trainer`."""
