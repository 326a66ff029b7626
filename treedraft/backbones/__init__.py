"""Who sees whom inside a draft block: one file a mask."""
