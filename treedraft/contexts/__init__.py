"""What a block sees of the prefix: one file a choice."""
