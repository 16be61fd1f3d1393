"""The decoder: what it computes, what it costs, where it runs."""
