"""Configurations: their keys, their rules, and how they are read."""
