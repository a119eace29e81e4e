"""The paper's tables and figures, at any scale: a declared matrix of runs, a small record of each, and what the records say."""
