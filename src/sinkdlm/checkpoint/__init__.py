"""Checkpoints on disk: weights, config, tokenizer and provenance, written so that a crash leaves no half."""
