"""Run folders and trained models as files: written whole, verified when read."""
