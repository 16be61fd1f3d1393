"""An attention normalizer is a function of a query's scores, and of the number n of its keys, that gives attention
weights.
"""
