"""Campaigns against a real racerd: each module is one, `python -m tools.torture NAME` runs it."""
