"""TeraPipe: pipelining over the tokens of one sequence, in slices chosen by dynamic programming (ICML 2021)."""
