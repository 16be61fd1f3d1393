"""What a trained model does: measured on pinned held-out tokens, kept as JSON in the run folder."""
