"""Binary denoising (Domke 2010 and 2013)."""
