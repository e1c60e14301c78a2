# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The adjustment rule: quantised for x served on -> factor, and its override."""

import pytest
import torch

from tests import device_numbers
from vllm.fp8_inc.adjustment import (
    ENV,
    FLAVOR_KEY,
    Adjustment,
    logger,
    resolve_adjustment,
)
from vllm.fp8_inc.formats import GAUDI2, GAUDI3

FN, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
ON, OFF = 448 / 240, 240 / 448


def resolve(flavor, served_on, forced=None):
    environ = {} if forced is None else {ENV: forced}
    config = None if flavor is None else {FLAVOR_KEY: flavor}
    return resolve_adjustment(config, served_on, environ)


@pytest.mark.parametrize(
    "flavor, served_on, factor, weight_factor",
    [
        (FNUZ, GAUDI2, 1.0, 1.0),
        (FN, GAUDI2, ON, 2.0),
        (None, GAUDI2, ON, 2.0),
        (FN, GAUDI3, 1.0, 1.0),
        (None, GAUDI3, 1.0, 1.0),
        (FNUZ, GAUDI3, OFF, 1.0),
    ],
)
def test_the_flavour_of_a_checkpoint_gives_the_factor(
    flavor, served_on, factor, weight_factor
):
    adjustment = resolve(flavor, served_on)
    assert adjustment.factor == factor
    assert adjustment.weight_factor == weight_factor
    assert adjustment.served_on is served_on
    assert adjustment.quantised_for is (GAUDI2 if flavor == FNUZ else GAUDI3)
    assert adjustment.reason == (
        f"no {FLAVOR_KEY}" if flavor is None else f"{FLAVOR_KEY} {flavor}"
    )


@pytest.mark.parametrize("forced", ["true", "TRUE", "True", "1"])
@pytest.mark.parametrize("flavor", [None, FN, FNUZ, "unheard-of"])
@pytest.mark.parametrize(
    "served_on, quantised_for, factor, weight_factor",
    [(GAUDI2, GAUDI3, ON, 2.0), (GAUDI3, GAUDI2, OFF, 1.0)],
)
def test_true_says_made_for_the_other_device(
    forced, flavor, served_on, quantised_for, factor, weight_factor
):
    adjustment = resolve(flavor, served_on, forced)
    assert adjustment == Adjustment(quantised_for, served_on, f"{ENV}={forced}")
    assert (adjustment.factor, adjustment.weight_factor) == (factor, weight_factor)


@pytest.mark.parametrize("forced", ["false", "FALSE", "False", "0"])
@pytest.mark.parametrize("flavor", [None, FN, FNUZ, "unheard-of"])
@pytest.mark.parametrize("served_on", [GAUDI2, GAUDI3])
def test_false_says_made_for_the_device_that_serves(forced, flavor, served_on):
    adjustment = resolve(flavor, served_on, forced)
    assert adjustment == Adjustment(served_on, served_on, f"{ENV}={forced}")
    assert (adjustment.factor, adjustment.weight_factor) == (1.0, 1.0)


@pytest.mark.parametrize("forced", ["", "yes", "2", "on", " true"])
def test_another_value_of_the_variable_is_an_error_that_names_both(forced):
    with pytest.raises(ValueError) as error:
        resolve(FN, GAUDI3, forced)
    assert f"{ENV}={forced!r}" in str(error.value)


@pytest.mark.parametrize("flavor", ["float8_e5m2", "FLOAT8_E4M3FN", "", 240, False])
def test_an_unknown_flavour_is_an_error_that_says_the_way_out(flavor):
    with pytest.raises(ValueError) as error:
        resolve(flavor, GAUDI2)
    text = str(error.value)
    for part in (f"quantization_config.{FLAVOR_KEY}", repr(flavor), FN, FNUZ, ENV):
        assert part in text


@pytest.mark.parametrize("config", [None, {}, {"quant_method": "fp8"}])
def test_a_checkpoint_that_says_nothing_was_made_for_448(config):
    assert resolve_adjustment(config, GAUDI2, {}).quantised_for is GAUDI3


def test_the_variable_is_read_from_the_environment_at_each_call(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    assert resolve_adjustment({FLAVOR_KEY: FNUZ}, GAUDI3).factor == OFF
    monkeypatch.setenv(ENV, "false")
    assert resolve_adjustment({FLAVOR_KEY: FNUZ}, GAUDI3).factor == 1.0


@pytest.mark.parametrize("flavor, maximum", [(FN, 448.0), (FNUZ, 240.0)])
@pytest.mark.parametrize("served_on", [GAUDI2, GAUDI3])
def test_amax_meets_the_largest_code_of_the_device(flavor, maximum, served_on):
    """amax = scale x max at quantisation = adjusted scale x max when serving."""
    amax = 3.7
    dequant_scale = amax / maximum * resolve(flavor, served_on).factor
    scaled = torch.tensor([amax, 0.9 * amax]) / dequant_scale
    read = device_numbers.decode(served_on.encode(scaled).numpy(), served_on.name)
    largest = device_numbers.MAXIMUM[served_on.name]
    assert read[0] == largest, "amax uses the whole range"
    assert read[1] == pytest.approx(0.9 * largest, rel=2**-4), "nothing else saturates"
    assert dequant_scale * served_on.max == pytest.approx(amax)


@pytest.mark.parametrize(
    "flavor, served_on, forced, said",
    [
        (FN, GAUDI2, "false", "values above 53.6% of the calibrated amax saturate"),
        (None, GAUDI2, "false", "no fp8_dtype_flavor means 448"),
        (FNUZ, GAUDI3, "false", "the calibrated amax takes 53.6% of the range"),
        (FNUZ, GAUDI2, "true", "the calibrated amax takes 53.6% of the range"),
        (FN, GAUDI3, "true", "values above 53.6% of the calibrated amax saturate"),
        (FNUZ, GAUDI2, "false", None),
        (FN, GAUDI2, "true", None),
        (FNUZ, GAUDI3, "true", None),
        ("unheard-of", GAUDI3, "true", None),
    ],
)
def test_a_variable_against_the_flavour_is_a_warning_with_numbers(
    monkeypatch, flavor, served_on, forced, said
):
    lines = []
    monkeypatch.setattr(logger, "warning_once", lines.append)
    resolve(flavor, served_on, forced)
    assert len(lines) == bool(said)
    assert not said or said in lines[0]


@pytest.mark.parametrize("flavor, heads", [(FNUZ, 448.0), (FN, 448.0), (None, 448.0)])
def test_scales_per_head_of_autoround_divide_by_448(flavor, heads):
    config = {"provider": "auto-round"} | ({FLAVOR_KEY: flavor} if flavor else {})
    adjustment = resolve_adjustment(config, GAUDI2, {})
    maximum = 240.0 if flavor == FNUZ else 448.0
    assert adjustment.amax(0.5, per_head=True) == 0.5 * heads
    assert adjustment.amax(0.5, per_head=False) == 0.5 * maximum
    forced = resolve_adjustment(config, GAUDI2, {ENV: "false"})
    assert forced.amax(0.5, per_head=True) == 0.5 * 240.0
