"""Ray brought up for a run and ended with it, and the signals that end a run."""
