# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Collectives; importing this registers the backend hccl."""

from soft_gaudi.collectives import install

install()
