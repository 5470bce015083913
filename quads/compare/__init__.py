"""`quads compare`: the same GRPO run under several numerics recipes, and what the numerics did to it."""
