"""A value head on the policy's last hidden states: what is still to come of the rollout's reward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from longrein.learning.loss import value_loss
from longrein.trainer.torch.policy import Policy


class ValueHead(nn.Module):
    """A linear layer from a hidden state [H] to the value of the context it stands for; 0 everywhere at first.

    It computes in float32 (or float64) whatever the model does. Values are those of the state that predicts a token:
    before the token is sampled.
    """

    def __init__(self, policy: Policy, learning_rate: float) -> None:
        super().__init__()
        described: Any = policy.model.config
        parameter = next(policy.model.parameters())
        width = int(described.get_text_config().hidden_size)
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.to(policy.device, torch.promote_types(parameter.dtype, torch.float32))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate, weight_decay=0.0)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[s, H] states → [s] values."""
        return self.linear(states.to(self.linear.weight.dtype))[:, 0]

    def learn(
        self,
        states: torch.Tensor,
        which: torch.Tensor,
        returns: torch.Tensor,
        sampled_values: torch.Tensor,
        weights: torch.Tensor,
        value_clip: float,
    ) -> tuple[torch.Tensor, float]:
        """Add the gradient of Σ w·ℓ to the head's parameters; the gradient to `states` [s, H] and the loss.

        `which` [n] is the state of each of n tokens.
        """
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            losses = value_loss(self(leaf)[which], returns, sampled_values, value_clip)
            total = (weights * losses).sum()
            total.backward()
        assert leaf.grad is not None
        return leaf.grad, float(total.detach())
