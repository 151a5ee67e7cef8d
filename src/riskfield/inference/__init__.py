"""Algorithms, one to a file, and the loop they share."""
