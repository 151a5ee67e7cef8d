"""Outdoor scenes (Domke 2013, section 8.4)."""
