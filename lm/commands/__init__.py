"""The commands of `lm`, by subject: they read arguments and options, and call the package; heavy imports happen inside
functions.
"""
