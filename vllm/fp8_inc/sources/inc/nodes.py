# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the module paths in INC's files mean.

The layouts, oldest first; ``L`` is ``model.layers.N``, perhaps after
``language_model.``:

=====================================  ============================================
vLLM fork, 2024                        L.self_attn.attn.impl.{key,value}_cache,
                                       qk_matmul, kv_matmul
vLLM fork, 2025                        L.self_attn.attn.impl.k_cache,
                                       L.self_attn.mla_attn.impl.latent_cache_k
vllm-gaudi 0.14, 0.15, from 0.18       L.self_attn.mla_attn.mla_attn.impl.latent_cache_k
vllm-gaudi 0.16 to 0.17.1              the same without ``impl``
gpt-oss                                L.attn.attn.impl.k_cache
=====================================  ============================================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm.fp8_inc.sources.checkpoint import layer_of
from vllm.fp8_inc.sources.producers import Role

# Beyond the roles of a checkpoint. Both are of softmax_scale * query, since that is
# what the worker hands to matmul_qk: the query of a decode step, for MLA multiplied
# into the latent space. The q of Role is the query of the prefill, unscaled.
IncRole = Role | Literal["q_latent", "q_decode"]
_Input = Literal["k", "v", "latent", "q", "prob", "decode"]


@dataclass(frozen=True)
class AttentionNode:
    """A module inside an attention layer.

    Attributes:
        type: Its class in vllm-gaudi.
        inputs: What each input is. None: not ours to scale, since what is read from
            the cache keeps the scale with which it was written.
        is_cache: Whether it writes the cache.
    """

    type: str
    inputs: tuple[_Input | None, ...]
    is_cache: bool = False


def _cache(name: _Input) -> AttentionNode:
    return AttentionNode("VLLMKVCache", (name,), is_cache=True)


_QK = AttentionNode("Matmul", ("decode", None))
_AV = AttentionNode("Matmul", ("prob", None))

ATTENTION_NODES: Mapping[str, AttentionNode] = {
    "k_cache": _cache("k"),
    "v_cache": _cache("v"),
    "key_cache": _cache("k"),
    "value_cache": _cache("v"),
    "latent_cache_k": _cache("latent"),
    "latent_cache_k_nodeq": _cache("latent"),
    "latent_cache_v": _cache("latent"),
    "matmul_qk": _QK,
    "matmul_av": _AV,
    "qk_matmul": _QK,
    "kv_matmul": _AV,
    "fused_scaled_dot_product_attention": AttentionNode(
        "ModuleFusedSDPA", ("q", None, None, "prob")
    ),
}

# Classes of other modules by the last part of the path. A linear layer that is not
# here has no known class: lists of types and layer_types then pass it by.
_OTHER_TYPES: Mapping[str, str] = {
    "batch2block_matmul": "B2BMatmul",
    "block2batch_matmul": "B2BMatmul",
    "softmax": "Softmax",
    "moe_op": "VllmMixtureOfExpertsOp",
    "w13_list": "MoeMatmul",
    "w2_list": "MoeMatmul",
    "qkv_proj": "QKVParallelLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "q_proj": "ColumnParallelLinear",
    "q_b_proj": "ColumnParallelLinear",
    "kv_b_proj": "ColumnParallelLinear",
    "q_a_proj": "ReplicatedLinear",
    "kv_a_proj_with_mqa": "ReplicatedLinear",
    "gate": "ReplicatedLinear",
    "router": "ReplicatedLinear",
    "lm_head": "ParallelLMHead",
}
_EXPERT = re.compile(
    r"(?P<moe>.*\bmoe_op)\.(?P<list>w13_list|w2_list)\.(?P<index>[0-9]{1,6})"
)


@dataclass(frozen=True)
class AttentionPath:
    """A path of ``ATTENTION_NODES``.

    Attributes:
        layer: ``layers.N``, or None for a tower or an unknown layout.
        node: What the module is.
    """

    layer: str | None
    node: AttentionNode


def match_attention(path: str) -> AttentionPath | None:
    """Returns what ``path`` says where it is inside an attention layer."""
    module, _, name = path.rpartition(".")
    node = ATTENTION_NODES.get(name)
    if node is None:
        return None
    return AttentionPath(layer_of(module.removesuffix(".impl")), node)


@dataclass(frozen=True)
class ExpertPath:
    """The weight of one expert.

    Attributes:
        moe: Path of the layer's ``moe_op``.
        weights: ``w13_list`` or ``w2_list``.
        index: Of the expert, on its rank.
    """

    moe: str
    weights: str
    index: int


def match_expert(path: str) -> ExpertPath | None:
    """Returns what ``path`` says where it is the weight of an expert."""
    if "_list." in path and (found := _EXPERT.fullmatch(path)):
        return ExpertPath(found["moe"], found["list"], int(found["index"]))
    return None


def is_moe(path: str) -> bool:
    """Whether ``path`` is the ``moe_op`` of a layer."""
    return path.rpartition(".")[2] == "moe_op"


def uses_outputs(path: str) -> bool:
    """Whether INC makes scales of what the module at ``path`` returns.

    Outputs of others may be any number, NaN too: where nothing is reduced, INC 3.10
    measures a torch.empty(1) as the second output of a RowParallelLinear.
    """
    return is_moe(path) or type_of(path) in ("B2BMatmul", "ModuleFusedSDPA")


def type_of(path: str) -> str | None:
    """The class of the module at ``path``, or None where it cannot be told."""
    if match_expert(path):
        path = path.rpartition(".")[0]
    name = path.rpartition(".")[2]
    node = ATTENTION_NODES.get(name)
    return node.type if node else _OTHER_TYPES.get(name)
