"""What the studies of pictures share: data, training criteria, truncated fitting."""
