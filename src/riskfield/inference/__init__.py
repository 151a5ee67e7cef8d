"""Algorithms, one to a file, and `infer`, the loop they share."""
