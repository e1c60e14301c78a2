# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Muon: momentum whose update is made orthogonal, for matrices inside a network.

The five-step Newton-Schulz iteration and its coefficients are those of the
published method (Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks").
"""

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(update: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Pushes all singular values of [..., rows, columns] towards 1."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Updates matrices, and stacks of matrices one by one.

    Args:
        parameters: Tensors [rows, columns] or [experts, rows, columns].
        momentum: Share of the running mean that is kept.
        weight_decay: Decoupled, per step and unit of learning rate.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        self.parameters = parameters
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.means = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            gradient = parameter.grad
            mean.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(mean, self.momentum))
            rows, columns = parameter.shape[-2:]
            scale = max(1.0, rows / columns) ** 0.5
            parameter.mul_(1 - lr * self.weight_decay)
            parameter.add_(update, alpha=-lr * scale)
