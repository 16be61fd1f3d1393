"""Presentation of run folders: differences, tables, pictures and pages. Imports neither torch nor lightning."""
