"""The cost of a run: FLOPs, memory, seconds of a step. Imports no torch."""
