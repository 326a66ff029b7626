"""How a drafted position is conditioned on the tokens before it on its own branch: one file a choice."""
