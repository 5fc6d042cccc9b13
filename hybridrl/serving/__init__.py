"""A training API over HTTP: Tinker's, so that a client's loop takes the place of a recipe."""
