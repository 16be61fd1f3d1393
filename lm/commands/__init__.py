"""The commands of `lm`, by subject: arguments and options read, and handed on to the package; heavy imports happen inside."""
