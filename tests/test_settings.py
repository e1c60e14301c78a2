# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The options under --additional-config are read, checked and named in errors."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from vllm.fp8_inc.formats import GAUDI2, GAUDI3
from vllm.fp8_inc.settings import Settings


def settings_of(additional_config):
    return Settings.of(SimpleNamespace(additional_config=additional_config))


@pytest.mark.parametrize(
    "additional_config",
    [{}, {"other": {"device": "gaudi2"}}, {"fp8_inc": {}}, object()],
    ids=["empty", "somebody-elses", "no-options", "not-a-dict"],
)
def test_without_options_gaudi3_serves_and_missing_scales_are_errors(additional_config):
    settings = settings_of(additional_config)
    assert (settings.device, settings.missing_scales) == ("gaudi3", "error")
    assert settings.format is GAUDI3


@pytest.mark.parametrize("device, fmt", [("gaudi2", GAUDI2), ("gaudi3", GAUDI3)])
def test_the_device_chooses_the_format(device, fmt):
    assert settings_of({"fp8_inc": {"device": device}}).format is fmt


def test_legacy_scales_is_a_path_or_nothing():
    assert settings_of({}).legacy_scales is None
    assert settings_of({"fp8_inc": {"legacy_scales": "a.json"}}).legacy_scales == (
        "a.json"
    )


def test_missing_scales_may_be_unit():
    settings = settings_of({"fp8_inc": {"missing_scales": "unit"}})
    assert (settings.missing_scales, settings.device) == ("unit", "gaudi3")


@pytest.mark.parametrize(
    "options, named",
    [
        ({"device": "gaudi1"}, ["device is ", "'gaudi1'", "gaudi2", "gaudi3"]),
        ({"device": "Gaudi2"}, ["device is ", "'Gaudi2'"]),
        ({"device": None}, ["device is ", "None"]),
        ({"device": ["gaudi2"]}, ["device is ", "['gaudi2']"]),
        ({"missing_scales": "ignore"}, ["missing_scales is ", "'ignore'", "unit"]),
        ({"legacy_scales": 3}, ["legacy_scales is ", "3"]),
        ({"legacy_scales": ""}, ["legacy_scales is ", "''"]),
        ({"devise": "gaudi2"}, ["devise is ", "'gaudi2'"]),
        (
            {"device": 2, "missing_scales": True},
            ["device is ", "2", "missing_scales is ", "True"],
        ),
        (None, ["fp8_inc is ", "None"]),
        ("gaudi2", ["fp8_inc is ", "'gaudi2'"]),
        ([], ["fp8_inc is ", "[]"]),
    ],
)
def test_a_wrong_option_is_an_error_that_names_key_and_value(options, named):
    with pytest.raises(ValueError, match="--additional-config") as error:
        settings_of({"fp8_inc": options})
    assert not isinstance(error.value, ValidationError), "one line, not pydantic's"
    text = str(error.value)
    assert all(part in text for part in named), text
    assert "\n" not in text


def test_settings_cannot_change_after_start():
    settings = settings_of({})
    with pytest.raises(ValidationError, match="frozen"):
        settings.device = "gaudi2"


def test_hpu_matmul_is_fp8_or_bf16():
    assert settings_of({}).hpu_matmul == "fp8"
    assert settings_of({"fp8_inc": {"hpu_matmul": "bf16"}}).hpu_matmul == "bf16"
    with pytest.raises(ValueError, match="hpu_matmul is 'fp16'"):
        settings_of({"fp8_inc": {"hpu_matmul": "fp16"}})
