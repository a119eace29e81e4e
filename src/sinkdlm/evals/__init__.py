"""Evaluation: requests.py holds requests and responses, answering.py answers them, harness.py connects lm-eval."""
