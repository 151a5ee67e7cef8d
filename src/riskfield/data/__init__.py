"""Labelled examples on factor graphs."""
