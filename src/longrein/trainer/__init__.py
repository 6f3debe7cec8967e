"""From finished rollouts to a new policy: the loop, its parts, and what a person sees of it."""
