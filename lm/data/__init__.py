"""From text to sequences of tokens: sources, tokenizer, token store, and the order in which a run reads the store."""
