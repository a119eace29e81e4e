"""The demo: train twins that differ in one flag on a small language, and measure their attention.

language.py makes the language, run.py trains, scores and reports, screen.py shows training, words.py writes the closing text.
It uses the package as a user would; the command line and `reproduce` (the language) import it.
"""
