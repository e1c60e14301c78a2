# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Where compiled kernels are kept, and when they are not."""

import os
from types import SimpleNamespace

import pytest

from vllm.fp8_inc.attention.kernels import runtime


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """What runtime reads of the environment."""
    settings = SimpleNamespace(
        VLLM_CACHE_ROOT=str(tmp_path), VLLM_DISABLE_COMPILE_CACHE=False
    )
    monkeypatch.setattr(runtime, "envs", settings)
    return settings


@pytest.fixture
def folder(settings):
    """The function that chooses the folder, without its memory."""
    return runtime.cache_folder.__wrapped__


def test_only_its_user_may_read_and_write_it(folder):
    assert folder().stat().st_mode & 0o777 == 0o700
    assert folder() == folder()


def test_a_folder_that_others_can_write_is_refused(folder, caplog_vllm):
    folder().parent.chmod(0o777)
    assert folder() is None
    assert "can be written by others; chmod 700 it" in caplog_vllm.text


def test_another_users_folder_is_refused(folder, caplog_vllm, monkeypatch):
    folder()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert folder() is None
    assert f"belongs to user {user}" in caplog_vllm.text


def test_nothing_is_kept_where_vllm_keeps_nothing(folder, settings, tmp_path):
    settings.VLLM_DISABLE_COMPILE_CACHE = True
    assert folder() is None
    assert not list(tmp_path.iterdir())
