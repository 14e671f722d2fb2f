"""The record of a training: what its files hold, and how they are put together again."""
