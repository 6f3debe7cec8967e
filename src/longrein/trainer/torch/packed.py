"""Linear layers over weights that oneDNN has laid out for few rows, while sampling on a CPU.

A BLAS library lays the weights out anew for every product, and for the few rows of a decode step that takes longer than
the product. oneDNN takes weights that are laid out already; they are made once per policy version, at the first pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

#: Rows that the layout is chosen for; it serves any number.
ROWS = 64
#: Weights of the smallest layer that is packed: below it overheads decide, not the product.
LEAST_WEIGHTS = 2**16


class PackedLinears:
    """Gives a model's linear layers a forward that samples over packed weights and learns over their own.

    Only in inference mode, which the sampler alone uses, are packed weights looked at: a copy of weights that a learner
    is changing would be stale. Does nothing for models on other devices or of other types than float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears: list[_Packed] = []
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
            return
        for module in model.modules():
            # Exactly nn.Linear: a subclass may compute something else.
            if type(module) is not nn.Linear or module.weight.device.type != "cpu":
                continue
            if module.weight.dtype == torch.float32 and module.weight.numel() >= LEAST_WEIGHTS:
                own = vars(module).get("forward")
                packed = own if isinstance(own, _Packed) else _Packed(module)
                module.forward = packed  # type: ignore[method-assign]
                self._linears.append(packed)

    def forget(self) -> None:
        """The weights have changed."""
        for linear in self._linears:
            linear.forget()


class _Packed:
    """A linear layer's forward."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        if not x.is_inference() or x.dtype != weight.dtype:
            return nn.functional.linear(x, weight, bias)
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def forget(self) -> None:
        self._packed = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        """A copy of the model has weights of its own."""
        return _Packed(copy.deepcopy(self._module, memo))
