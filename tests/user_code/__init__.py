"""Is training exact or refused, whatever the user's code does? `runner.py` says how the cases are run."""
