"""The inspector's page, and the bundle that makes one file of it."""
