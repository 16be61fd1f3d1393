"""lm: what does an attention normalizer do to a language model?"""

__version__ = "0.1.0"
