"""This package has the decoder: what it computes, what it costs, and on which device it runs."""
