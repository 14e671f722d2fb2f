"""Whole trainings. `docs/benchmarks.md` has the results; `python -m benchmarks.studies.NAME` starts one."""
