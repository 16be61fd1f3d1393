"""This package turns text into sequences of tokens: sources, tokenizer, token store, and the order in which a run reads
the store.
"""
