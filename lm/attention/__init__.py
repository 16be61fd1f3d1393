"""Attention normalizers: functions of a query's scores, and of the number n of its keys, that give attention
weights.
"""
