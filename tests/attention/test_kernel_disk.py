# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Where compiled kernels are kept, and when they are not."""

import os
import time
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


def test_kernels_of_old_sources_are_deleted_when_unused(folder, tmp_path):
    root = folder().parent
    elsewhere = tmp_path / "elsewhere"
    names = {"0123456789abcdef", "f" * 16, "notes", "f" * 15}
    for path in (elsewhere, *(root / name for name in names)):
        path.mkdir()
        (path / "file").touch()
    (root / ("a" * 16)).symlink_to(elsewhere)
    month_ago = time.time() - 31 * 24 * 60 * 60
    for path in (elsewhere, folder(), *(root / name for name in names - {"f" * 16})):
        os.utime(path, (month_ago, month_ago))
    kept = {folder().name, "f" * 16, "notes", "f" * 15, "a" * 16}
    assert {path.name for path in root.iterdir()} == kept
    assert (elsewhere / "file").exists()


def test_a_folder_that_cannot_be_deleted_stops_nothing(folder, monkeypatch):
    other = folder().parent / "0123456789abcdef"
    other.mkdir()
    os.utime(other, (0, 0))

    def vanished(path, ignore_errors):
        other.rmdir()
        raise FileNotFoundError(path)

    monkeypatch.setattr(runtime.shutil, "rmtree", vanished)
    assert folder().is_dir()
