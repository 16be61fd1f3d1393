"""Train and judge the runs of an experiment file, for each arm, seed and learning rate, by the procedure of
docs/statistics.md.
"""
