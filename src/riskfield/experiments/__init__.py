"""Experiments of the papers, in one command each."""
