"""From text to rows of tokens: sources, tokenizer, token store, and the order in which a run reads it."""
