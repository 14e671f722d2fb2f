"""Which models of transformers can be cut into a pipeline: `python -m tests.supported_models` writes their page."""
