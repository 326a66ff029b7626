"""Attention of a draft tree's rows over a long prefix and the tree itself: each row sees the prefix and its own path."""
