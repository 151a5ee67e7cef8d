"""How accurate and how fast gradients through inference are."""
