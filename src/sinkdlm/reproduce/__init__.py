"""Reproduce the paper's tables and figures at any scale: a declared matrix of runs, their results, verdicts on claims."""
