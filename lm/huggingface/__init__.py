"""Models of Hugging Face, in and out: their configurations, names of weights, files and tokenizers."""
