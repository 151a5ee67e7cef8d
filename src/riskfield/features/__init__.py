"""What models read: features of pictures."""
