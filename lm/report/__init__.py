"""This package presents run folders as differences, tables, pictures and pages. It imports neither torch nor
lightning."""
