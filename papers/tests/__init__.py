"""Tests of the studies, at reduced sizes."""
