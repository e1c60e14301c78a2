# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Under which names each producer keeps KV and attention scales: data only.

``checkpoint`` matches keys by this table and docs/formats.md is generated from
it. A name is what follows the attention module: ``k_scale`` of
``model.layers.3.self_attn.k_scale``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["q", "q_latent", "k", "v", "prob"]
Use = Literal["dequant_scale", "quant_scale", "zero", "ignored"]


@dataclass(frozen=True)
class Tensor:
    """What a tensor of a checkpoint is.

    Attributes:
        roles: What it scales; a fused scale is for k and v.
        use: ``dequant_scale`` (x = q * s), ``quant_scale`` (q = x * s, turned to
            its reciprocal), ``zero`` (a zero-point, which must be 0), or
            ``ignored`` (no scale; a debug line counts them).
        only: The kind of attention that has it, where it is one of them.
    """

    roles: tuple[Role, ...]
    use: Use = "dequant_scale"
    only: Literal["MHA", "MLA"] | None = None


@dataclass(frozen=True)
class Producer:
    """One row of the table.

    Attributes:
        name: Who writes it.
        tensors: Name below the attention module -> what it is.
        shape: Shapes and dtypes, for the page.
        config: Keys of config.json that announce it, for the page.
        handling: What this fork does with it, for the page.
        module: An attention module as this producer writes it.
        quant_methods: ``quantization_config.quant_method`` of such checkpoints.
        provider: ``quantization_config.provider``, where it is what tells two
            producers with the same names apart.
    """

    name: str
    tensors: Mapping[str, Tensor]
    shape: str
    config: str
    handling: str
    module: str = "model.layers.N.self_attn"
    quant_methods: tuple[str, ...] = ()
    provider: str | None = None


def _each(
    template: str,
    roles: str = "kv",
    use: Use = "dequant_scale",
    only: Literal["MHA", "MLA"] | None = None,
) -> dict[str, Tensor]:
    """One tensor for each of one-letter ``roles``, which stand in the name."""
    return {template.format(role): Tensor((role,), use, only) for role in roles}  # type: ignore[arg-type]


def _fused(
    name: str,
    use: Use = "dequant_scale",
    only: Literal["MHA", "MLA"] | None = None,
) -> dict[str, Tensor]:
    """One tensor for k and v."""
    return {name: Tensor(("k", "v"), use, only)}


_COMPRESSED = ("compressed-tensors",)
_SCHEME = "`kv_cache_scheme` {num_bits, type, strategy, symmetric, dynamic}"
_ZERO_POINTS = "Zero-points must be 0."

PRODUCERS = (
    Producer(
        name="AutoFP8 (old), early Quark",
        tensors=_fused("kv_scale"),
        shape="() or [1]",
        config="`quant_method` fp8 or quark",
        handling="Loaded for k and for v.",
        quant_methods=("fp8", "quark"),
    ),
    Producer(
        name="AutoFP8 (newer)",
        tensors=_each("{}_scale"),
        shape="() or [1]",
        config="`quant_method` fp8",
        handling="Loaded.",
        quant_methods=("fp8",),
    ),
    Producer(
        name="compressed-tensors before August 2024",
        tensors=_each("{}_proj.output_scale"),
        shape="[1]",
        config="`kv_cache_scheme`, perhaps under `compression_config`",
        handling="Loaded.",
        quant_methods=_COMPRESSED,
    ),
    Producer(
        name="llm-compressor (KV cache)",
        tensors=_each("{}_scale") | _each("{}_zero_point", use="zero"),
        shape="[1], or per head [heads, 1, 1], in the dtype of the model",
        config=_SCHEME,
        handling=f"Loaded. {_ZERO_POINTS}",
        quant_methods=_COMPRESSED,
    ),
    Producer(
        name="llm-compressor (attention)",
        tensors=_each("{}_scale", "qkv") | _each("{}_zero_point", "qkv", "zero"),
        shape="[1], or per head [heads, 1, 1], in the dtype of the model",
        config=f"{_SCHEME}, and a `config_groups` entry for the attention class",
        handling=f"Loaded. {_ZERO_POINTS}",
        quant_methods=_COMPRESSED,
    ),
    Producer(
        name="This fork (vllm kv-scales)",
        tensors=_each("{}_scale", "qkv")
        | {"q_latent_scale": Tensor(("q_latent",), only="MLA")}
        | {"prob_scale": Tensor(("prob",))},
        shape="[1] or per head [heads, 1, 1], fp32",
        config=f"{_SCHEME}, `provider` kv-scales",
        handling="Loaded. `q_latent_scale` is for the query that MLA absorbs "
        "kv_b_proj into; `q_scale` for the one before.",
        quant_methods=_COMPRESSED,
        provider="kv-scales",
    ),
    Producer(
        name="AutoRound",
        tensors=_each("{}_scale", "qkv") | {"q_max": Tensor((), "ignored")},
        shape="[1] or per head [heads], fp32",
        config="`provider` auto-round, perhaps `fp8_dtype_flavor`",
        handling="Loaded; scales per head divide by 448 whatever the flavour is. "
        "`q_max`, which early versions leak, is ignored with a "
        "debug line.",
        quant_methods=_COMPRESSED,
        provider="auto-round",
    ),
    Producer(
        name="ModelOpt",
        tensors={f"{r}_proj.{r}_scale": Tensor((r,)) for r in ("k", "v")},
        shape="() fp32",
        config="`kv_cache_quant_algo` or `kv_cache_scheme`",
        handling="Loaded. Scales clamped to 1.0 (before 0.43) are pointed out.",
        quant_methods=("modelopt", "modelopt_mixed"),
    ),
    Producer(
        name="ModelOpt (Nemotron-H)",
        tensors={f"{r}_proj.{r}_scale": Tensor((r,)) for r in ("k", "v")},
        shape="() fp32",
        config="`kv_cache_quant_algo` or `kv_cache_scheme`",
        handling="Loaded. Scales clamped to 1.0 (before 0.43) are pointed out.",
        module="backbone.layers.N.mixer",
        quant_methods=("modelopt", "modelopt_mixed"),
    ),
    Producer(
        name="ModelOpt (TensorRT-LLM)",
        tensors=_fused("kv_cache_scaling_factor"),
        shape="[1]",
        config="",
        handling="Loaded for k and for v.",
        module="transformer.layers.N.attention",
    ),
    Producer(
        name="Quark",
        tensors=_each("{}_proj.output_scale", "q")
        | _each("{}_proj.output_scale")
        | {"prob_output_scale": Tensor(("prob",))}
        | _fused("kv_b_proj.output_scale", only="MLA"),
        shape="()",
        config="`export.kv_cache_group`, `layer_quant_config[*].output_tensors`",
        handling="Loaded; `kv_b_proj.output_scale` for k and for v.",
        quant_methods=("quark",),
    ),
    Producer(
        name="AngelSlim (HYV3)",
        tensors=_each("{}_cache.scale") | _each("{}.scale", "q"),
        shape="()",
        config="",
        handling="Loaded.",
    ),
    Producer(
        name="Qwen3-MoE, renamed on the way",
        tensors=_each("qkv_proj.{}_scale") | _each("qkqkv_proj.{}_scale"),
        shape="()",
        config="",
        handling="Loaded.",
    ),
    Producer(
        name="Mistral (consolidated)",
        tensors=_each("{}_fake_quantizer.qscale_act", "qkv")
        | _fused("kv_fake_quantizer.qscale_act"),
        shape="()",
        config="none; params.json",
        handling="Loaded; `kv_fake_quantizer` for k and for v.",
        module="layers.N.attention",
    ),
    Producer(
        name="INC (vLLM-compatible save)",
        tensors=_fused("kv_scale"),
        shape="()",
        config="`quant_method` inc or fp8",
        handling="Loaded for k and for v: it is the larger of the two.",
        quant_methods=("inc", "fp8"),
    ),
    Producer(
        name="INC (native)",
        tensors=_each("{}_cache.dequant_output.scale", only="MHA")
        | _each("{}_cache.quant_input.scale_inv", "kv", "quant_scale", "MHA")
        | _fused("latent_cache_k.dequant_output.scale", only="MLA")
        | _fused("latent_cache_k.quant_input.scale_inv", "quant_scale", "MLA"),
        shape="()",
        config="`quant_method` inc",
        handling="Loaded; `scale_inv` is turned to its reciprocal and yields to "
        "`scale` where both are there.",
        module="model.layers.N.self_attn.attn.impl",
        quant_methods=("inc",),
    ),
)
