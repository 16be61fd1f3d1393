"""Reports on run folders: one run, or arms compared on the same tokens. Imports neither torch nor lightning."""
