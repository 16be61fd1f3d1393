"""This package computes statistics of a model's attention: what its weights look like, by layer, head and position."""
