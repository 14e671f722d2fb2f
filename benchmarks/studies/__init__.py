"""Whole trainings, whose results `docs/benchmarks.md` has; `python -m benchmarks.studies.NAME` starts one."""
