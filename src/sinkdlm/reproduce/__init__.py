"""The paper's tables and figures, at any scale: a declared matrix of runs, a small result of each, and what the results say."""
