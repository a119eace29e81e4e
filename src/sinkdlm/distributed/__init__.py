"""Ranks: who they are, how they meet, whether they are alive, and which part of a tensor each holds."""
