"""Do stored results and the pages that quote them agree? `make docs-check` asks; no change of code alone can fail it."""
