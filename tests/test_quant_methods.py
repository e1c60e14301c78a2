# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8 weights and KV scales of every quant_method, loaded and served.

MLA, with experts, is served on Gaudi2, which halves the weights, and compared with
transformers; MHA on Gaudi3.
"""

from typing import Any

import pytest
import torch

from tests.checkpoints import kv_scales, llama_config, quantize, weights, write
from tests.engines import ask, attention_layers, engine, model_of, prompt
from tests.oracle import Oracle
from tests.quant_methods import BUILDERS, FORMATS, Checkpoint, build, modelopt
from tests.test_mla_numbers import (
    LATENT,
    MEDIAN_BOUND,
    SHORT_PROMPTS,
    device,
    median_distance,
)
from tests.weight_oracle import WeightOracle

SERVED_ON = {"MHA": ("gaudi3", 448.0), "MLA": ("gaudi2", 240.0)}
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
CASES = [
    pytest.param(
        row,
        kind,
        id=f"{row.name}, {kind}",
        marks=[pytest.mark.slow] if row.slow and kind == "MHA" else [],
    )
    for row in FORMATS
    for kind in BUILDERS
]
Projection = tuple[torch.Tensor, float | None]


def projections(model: torch.nn.Module) -> dict[str, Projection]:
    """Dequantised weight and input dequant scale of each FP8 projection."""
    found: dict[str, Projection] = {}
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            found |= experts(module)
        elif getattr(module, "scheme", None) is not None:
            parent, _, leaf = module.scheme.layer_name.rpartition(".")
            values = module.weight.float() * module.weight_scale[:, None]
            inputs = reciprocal(module.input_quant_scale)
            parts = values.split(module.logical_widths)
            for part, weight in zip(FUSED.get(leaf, [leaf]), parts, strict=True):
                found[f"{parent}.{part}"] = weight, inputs
    return found


def experts(module: torch.nn.Module) -> dict[str, Projection]:
    name, found = module.quant_method.layer_name, {}
    static = module.w13_input_quant_scale is not None
    for e in range(len(module.w13_weight)):
        w13 = module.w13_weight[e].float() * module.w13_weight_scale[e][:, None]
        down = module.w2_weight[e].float() * module.w2_weight_scale[e][:, None]
        hidden = reciprocal(module.w13_input_quant_scale)
        inner = reciprocal(module.w2_input_quant_scale[e]) if static else None
        for part, weight in zip(("gate", "up"), w13.chunk(2), strict=True):
            found[f"{name}.{e}.{part}_proj"] = weight, hidden
        found[f"{name}.{e}.down_proj"] = down, inner
    return found


def reciprocal(quant_scale: torch.Tensor | None) -> float | None:
    return None if quant_scale is None else 1 / quant_scale.item()


def expected_inputs(tensors: dict[str, torch.Tensor], name: str) -> float | None:
    """The largest input scale of the projections that share an input."""
    parent, _, leaf = name.rpartition(".")
    leaves = next((parts for parts in FUSED.values() if leaf in parts), [leaf])
    if ".experts." in name and leaf != "down_proj":
        parent = parent.rpartition(".")[0]
    scales = [
        tensor.item()
        for key, tensor in tensors.items()
        if key.startswith(f"{parent}.") and key.endswith(".input_scale")
        if key.split(".")[-2] in leaves
    ]
    return max(scales, default=None)


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights where Gaudi2 holds every code; each of ours has one of 448."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            result[name] = (tensor.float() / 2).to(torch.float8_e4m3fn)
        elif ".weight_scale" in name:
            result[name] = tensor * 2
    return result


def check_weights(
    found: dict[str, Projection], checkpoint: Checkpoint, maximum: float
) -> None:
    tensors = checkpoint.tensors
    oracle = WeightOracle(tensors if maximum == 448 else halved(tensors), maximum)
    assert found.keys() == checkpoint.quantized
    for name, (weight, inputs) in found.items():
        assert torch.equal(weight, oracle.plain[f"{name}.weight"]), name
        scale = expected_inputs(tensors, name)
        if scale is not None:
            scale = pytest.approx(scale * 448 / maximum, rel=1e-6)
        assert inputs == scale, name


def check_absorbed(llm: Any, checkpoint: Checkpoint, maximum: float) -> None:
    """What decode multiplies with is the dequantised weight of kv_b_proj."""
    oracle = WeightOracle(halved(checkpoint.tensors), maximum)
    for n, layer in enumerate(attention_layers(llm)):
        weight = oracle.plain[f"model.layers.{n}.self_attn.kv_b_proj.weight"]
        heads, nope, latent = layer.W_UK_T.shape
        k, v = weight.view(heads, -1, latent).tensor_split([nope], dim=1)
        assert torch.equal(layer.W_UK_T, k)
        assert torch.equal(layer.W_UV, v.transpose(1, 2).contiguous())


def check_scales(llm: Any, kind: str, factor: float) -> None:
    stored = kv_scales(BUILDERS[kind]())
    layers = attention_layers(llm)
    assert len(layers) == 3
    for n, layer in enumerate(layers):
        k, v = (stored[f"model.layers.{n}.self_attn.{r}_scale"].item() for r in "kv")
        k = v if kind == "MLA" else k  # v is the larger one
        scales = layer.impl.scales
        assert scales.k.dequant_scale.item() == pytest.approx(k * factor, rel=1e-6)
        assert scales.v.dequant_scale.item() == pytest.approx(v * factor, rel=1e-6)


@pytest.mark.parametrize("row, kind", CASES)
def test_every_layer_has_the_checkpoints_numbers(tmp_path, row, kind):
    served, maximum = SERVED_ON[kind]
    factor = 448 / maximum
    checkpoint = build(tmp_path, row, kind)
    with engine(checkpoint.served, dtype="float32", **device(served)) as llm:
        check_weights(projections(model_of(llm)), checkpoint, maximum)
        check_scales(llm, kind, factor)
        if kind == "MLA":
            check_absorbed(llm, checkpoint, maximum)
            answers = ask(llm, SHORT_PROMPTS)
    if kind == "MLA":
        latent = [scale * factor for scale in LATENT]
        oracle = Oracle(checkpoint.plain, latent, maximum, factor)
        assert median_distance(answers, oracle) < MEDIAN_BOUND


def test_an_fp8_lm_head_is_served(tmp_path):
    """ModelOpt quantises it where it is told to, and so does AutoRound."""
    config = llama_config(num_hidden_layers=1)
    config["quantization_config"] = modelopt("FP8")([]) | {"ignore": []}
    plain = weights(config)
    # quantize() takes what is called a projection.
    plain["lm_head_proj.weight"] = plain.pop("lm_head.weight")
    tensors = {
        name.replace("lm_head_proj", "lm_head"): tensor
        for name, tensor in quantize(plain).items()
    }
    path = write(tmp_path, config, tensors | kv_scales(config))
    with engine(path, dtype="float32") as llm:
        (answer,) = ask(llm, [prompt(12)])
        head = model_of(llm).lm_head
        stored = tensors["lm_head.weight"].float() * tensors["lm_head.weight_scale"]
        assert torch.equal(head.weight.float() * head.weight_scale[:, None], stored)
    assert answer.logprobs.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modelopt FP8_PB_WO", "auto-round FP8_STATIC"])
def test_weights_reload(tmp_path, name):
    (row,) = [row for row in FORMATS if row.name == name]
    checkpoint = build(tmp_path, row, "MLA")
    with engine(checkpoint.served, dtype="float32", **device("gaudi2")) as llm:
        llm.collective_rpc("reload_weights")
        check_weights(projections(model_of(llm)), checkpoint, 240.0)
        check_absorbed(llm, checkpoint, 240.0)
