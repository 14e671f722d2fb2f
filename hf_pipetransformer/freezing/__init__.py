"""Which layers are frozen, and when: policies, the callback that asks them, and plain Trainers."""
