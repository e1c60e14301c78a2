# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The same names as torch.hpu, with graphs and metrics."""

import torch

from . import graphs, metrics
from .graphs import wrap_in_hpu_graph

for _name, _value in {
    "graphs": graphs,
    "metrics": metrics,
    "wrap_in_hpu_graph": wrap_in_hpu_graph,
}.items():
    setattr(torch.hpu, _name, _value)
globals().update(
    {name: value for name, value in vars(torch.hpu).items() if name[:2] != "__"}
)
