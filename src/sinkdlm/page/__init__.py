"""The inspector page, and the bundle that makes one file of it."""
