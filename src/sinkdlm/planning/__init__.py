"""What a run will cost: FLOPs, memory, seconds of a step. Imports no torch."""
