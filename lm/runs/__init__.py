"""Run folders and trained models are read and written here: files are written whole and verified when read."""
