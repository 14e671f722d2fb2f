"""Fault tolerance: atomic checkpoints, preemption, and the handling of processes that die or hang."""
