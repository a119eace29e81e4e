"""The command line. A command imports what it needs inside its own function."""
