"""Packed linear: a layer on a CPU whose weight is laid out once in the order that oneDNN's kernels read."""

from __future__ import annotations

import torch


class PackedLinear(torch.nn.Module):
    """``x @ weight.T + bias`` with the weight packed; values as :class:`torch.nn.Linear`'s up to the order of the sums.

    Args:
        linear: the layer, on the CPU; it stays as it is.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [..., in] → [..., out], of the weight's dtype. Named as the layer's own is: callers may name it."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return out
