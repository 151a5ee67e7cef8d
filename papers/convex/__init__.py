"""Learned convex inference on digits (Domke 2008)."""
