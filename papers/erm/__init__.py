"""Training for the loss of decoded output (Stoyanov, Ropson & Eisner 2011)."""
