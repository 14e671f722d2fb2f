"""Stores the outputs of user-frozen modules that depend on the batch alone, and reads them in later epochs."""
