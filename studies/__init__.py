"""Looks behind the reproduction's numbers that give no verdict: `python -m studies.NAME`. Outside the wheel."""
