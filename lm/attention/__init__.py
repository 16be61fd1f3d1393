"""Attention normalizers: from scores and row lengths to weights."""
