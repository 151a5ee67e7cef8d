"""Files: models, evidence and answers."""
