"""Longrein trains language-model agents by reinforcement learning in the harness they ship with."""

__version__ = "0.1.0"
