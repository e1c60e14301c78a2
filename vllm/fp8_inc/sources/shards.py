# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Shards that no index names, and shards that were cut short.

vLLM skips the former without a word, as it must: a folder may hold a model twice, in
Hugging Face's names and in Mistral's. Scales that exist nowhere else are another
matter. For the latter safetensors' error names no file.
"""

from collections.abc import Iterator
from pathlib import Path

from vllm.fp8_inc.sources.checkpoint import ScaleKey, match_scale_key
from vllm.fp8_inc.sources.folder import Folder, opened
from vllm.logger import init_logger

logger = init_logger(__name__)


def unlisted_scales(model: str) -> Iterator[tuple[Path, str, ScaleKey]]:
    """Yields file, key and meaning of each scale in a shard that no index names.

    Only headers of those shards are read. Nothing is yielded for a folder without
    an index, of which vLLM loads every shard, or for a name on a hub.
    """
    folder = Path(model)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return
    listed: set[str] = set()
    for index in indices:
        listed.update(Folder.weight_map(index).values())
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in listed:
            continue
        try:
            with opened(path) as shard:
                keys = list(shard.keys())
        except ValueError as error:
            logger.warning_once("fp8_inc: no index names it, but %s", error)
            continue
        for key in keys:
            found = match_scale_key(key)
            if found is not None and not found.tower:
                yield path, key, found


def check_readable(model: str) -> None:
    """Opens every safetensors file.

    Args:
        model: A folder, or a name on a hub, whose files are not looked at.

    Raises:
        ValueError: Naming the first that cannot be read, and why.
    """
    for path in sorted(Path(model).glob("*.safetensors")):
        with opened(path):
            pass
