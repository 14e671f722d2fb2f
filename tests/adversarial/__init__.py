"""User code that is hard to train exactly. `kit.py` says how to write a case, `runner.py` how a case is run."""
