# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales are for one device, and those of the other are refused where it shows."""

import pytest

from tests.sources.inc.helpers import (
    SAMPLES,
    cached,
    mha,
    read,
    values,
    write_config,
    write_file,
)
from vllm.fp8_inc.sources.inc.read import read_inc_scales

OTHER = {"gaudi2": "gaudi3", "gaudi3": "gaudi2"}


def sample(tmp_path, name, device, **keys):
    path = f"{SAMPLES}/{name}/inc_output"
    return read(tmp_path, device, dump_stats_path=path, **keys)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_cached_scales_of_the_other_device_show_in_the_measurements(
    tmp_path, kind, device
):
    name = f"tiny_{kind}_g{OTHER[device][-1]}_inc310"
    with pytest.raises(ValueError) as error:
        sample(tmp_path, name, device)
    text = str(error.value)
    assert f"was made for {OTHER[device]}, not for {device}" in text
    assert '"recalc_scales": true' in text
    assert ('"device_for_scales": "GAUDI2"' in text) == (device == "gaudi3")
    assert sample(tmp_path, name, device, recalc_scales=True).attention


def without_measurements(tmp_path, name):
    content = (SAMPLES / name / "inc_output_hooks_maxabs_MAXABS_HW.json").read_text()
    (tmp_path / "inc_output_hooks_maxabs_MAXABS_HW.json").write_text(content)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_they_show_by_the_hardwares_scales_alone(tmp_path, kind, device):
    without_measurements(tmp_path, f"tiny_{kind}_g{OTHER[device][-1]}_inc310")
    with pytest.raises(ValueError) as error:
        read(tmp_path, device)
    why = "no scale of gaudi2's hardware" if device == "gaudi2" else "Gaudi2's four"
    assert f"was made for {OTHER[device]}, not for {device}" in str(error.value)
    assert why in str(error.value)
    without_measurements(tmp_path, f"tiny_{kind}_g{device[-1]}_inc310")
    assert read(tmp_path, device).attention


def test_pow2_scales_alone_do_not_tell(tmp_path):
    scales = {path: cached(*[0.03125] * 4) for path in mha(0, 1, 1)}
    write_file(tmp_path, scales, "_MAXABS_POW2", "Scale")
    for device in OTHER:
        assert read(tmp_path, device, scale_method="maxabs_pow2").attention


def test_gaudi2_scales_on_gaudi3_when_asked_for(tmp_path):
    found = sample(tmp_path, "tiny_mha_g2_inc310", "gaudi3", device_for_scales="gaudi2")
    assert found.device == "gaudi2"
    assert values(found, "layers.0") == values(
        sample(tmp_path, "tiny_mha_g2_inc310", "gaudi2"), "layers.0"
    )


@pytest.mark.parametrize(
    "device, keys, part",
    [
        ("gaudi2", {"device_for_scales": "GAUDI3"}, "only Gaudi2's scales work on"),
        (
            "gaudi3",
            {"device_for_scales": "GAUDI2", "scale_method": "maxabs_pow2"},
            'needs "scale_method": "maxabs_hw", which is MAXABS_POW2',
        ),
    ],
)
def test_other_crossings_are_refused(tmp_path, device, keys, part):
    with pytest.raises(ValueError) as error:
        sample(tmp_path, "tiny_mha_g3_inc310", device, **keys)
    assert part in str(error.value) and "quant.json" in str(error.value)


def test_scales_that_do_not_fit_the_measurements_are_taken_with_a_warning(
    tmp_path, caplog_vllm
):
    write_file(tmp_path, mha(0, 3.0, 0.5))
    scales = {path: cached(*[64.0] * 4) for path in mha(0, 1, 1)}
    write_file(tmp_path, scales, "_MAXABS_HW", "Scale")
    assert values(read(tmp_path), "layers.0")["k"] == 64.0
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "10 of 10 scales are not what scale_method makes" in text


@pytest.mark.parametrize(
    "method, device, scale",
    [
        ("unit_scale", "gaudi2", 1.0),
        ("unit_scale", "gaudi3", 1.0),
        ("hw_aligned_single_scale", "gaudi2", 16.0),
        ("hw_aligned_single_scale", "gaudi3", 128.0),
    ],
)
def test_fixed_methods_need_no_files(tmp_path, method, device, scale):
    found = read(tmp_path, device, scale_method=method, dump_stats_path="")
    assert (found.fixed, found.files, found.attention) == (scale, (), {})
    assert found.ranks == "no files"
    assert found.quantises_cache("model.layers.0.self_attn.attn", False)


DYNAMIC = {
    "dynamic_quantization": True,
    "scale_method": "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw",
    "dump_stats_path": "",
}


def test_a_dynamic_method_has_no_scales_for_a_cache(tmp_path):
    """The two dynamic templates of vllm-gaudi: one blocks the cache, one does not."""
    blocked = {"blocklist": {"types": ["Matmul", "B2BMatmul", "VLLMKVCache"]}}
    found = read(tmp_path, **DYNAMIC, **blocked)
    assert found.fixed is None and not found.attention
    assert not found.quantises_cache("model.layers.0.self_attn.attn", False)
    with pytest.raises(ValueError, match='add "VLLMKVCache" to blocklist.types'):
        read(tmp_path, **DYNAMIC)


def test_rules_for_nodes_that_are_not_there_are_named(tmp_path, caplog_vllm):
    write_file(tmp_path, mha(0, 3.0, 0.5))
    part = {"rounding_method": "POW2", "backoff": 0.25}
    rules = {"weight": part, "activation": part}
    path = write_config(
        tmp_path,
        scale_method={"default": rules, "nodes": {"model.layers.9.k_cache": rules}},
    )
    read_inc_scales(path, "gaudi3", 0, 1)
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "model.layers.9.k_cache" in text and "lack" in text
