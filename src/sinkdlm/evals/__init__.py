"""Evaluation: requests.py and responses.py hold what is asked and answered, answering.py answers; harness.py is lm-eval's side."""
