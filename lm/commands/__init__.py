"""Defines the commands of `lm`. They read arguments and options, and call the package; functions import heavy modules
only when they need them.
"""
