"""Recipes: one folder an algorithm, found by dotted string. See recipes/README.md."""
