"""Is training exact or refused, for many kinds of users' code? `runner.py` tells how the cases are run."""
