"""Finds in the record what agents tried that they should not have: `rules.toml` says what, `audit.py` looks."""
