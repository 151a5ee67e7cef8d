"""Losses, one family per file. A loss maps theta and labels to one number per example, which training minimises."""
