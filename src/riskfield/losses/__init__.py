"""Losses, one family to a file: a number per example from theta and labels, to be minimised."""
