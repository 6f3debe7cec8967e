"""The mathematics of learning, as pure functions with their sources.

`advantage` turns the rewards of a group of rollouts into advantages (numpy, float64); `loss` is the loss of a sampled
token and what is worth knowing about it; `correction` weighs tokens that an older policy sampled (both torch). Nothing
here knows how a batch is cut or computed.
"""
