"""This package defines the configuration of a run: its keys, and rules between them. It reads, checks and writes
configurations.
"""
