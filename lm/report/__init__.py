"""What run folders show: differences, tables, pictures and pages. Imports neither torch nor lightning."""
