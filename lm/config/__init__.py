"""What a configuration is: its keys, its rules, and how it is read."""
