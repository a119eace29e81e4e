"""The demo: twins that differ in one flag learn a small language, and what their attention does is measured.

language.py has the language, run.py the order of things and the held-out sums, screen.py what is seen while they train, words.py
what is said at the end. A leaf that uses the package as a user would; nothing but the command line imports it.
"""
