"""Preemption: on SIGTERM, all processes save a checkpoint at the same step and exit."""
