"""Predictions to look at: how good they are, and a page that shows them."""
