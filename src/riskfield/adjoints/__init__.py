"""Gradients through inference, one method per file."""
