"""Connect the ranks of a run: rendezvous, collectives, heartbeats and the signals that end it."""
