# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a server would make of the scales of a checkpoint, found without one.

The server's own ScaleLoader runs on stand-ins for the attention layers: there is
one set of rules, and one wording.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.scale_loader import ScaleLoader
from vllm.fp8_inc.scales import AttentionScales
from vllm.fp8_inc.sources.folder import Folder


@dataclass(frozen=True)
class Verdict:
    """The outcome on one device.

    Attributes:
        device: gaudi2 or gaudi3.
        error: Why the server would not start, or None.
        adjustment: How the scales are fitted to the device, where that is known.
        loaded: The layers that get scales of the source.
        scales: Layer -> the scales that act; empty where the server does not start.
        said: What the server would log.
    """

    device: str
    error: str | None
    adjustment: Adjustment | None = None
    loaded: tuple[str, ...] = ()
    scales: dict[str, AttentionScales] = field(default_factory=dict)
    said: tuple[str, ...] = ()


def verdict(folder: Folder, device: str, legacy_scales: str | None = None) -> Verdict:
    """Lets the server's loader load the scales of ``folder``.

    Args:
        folder: The checkpoint.
        device: gaudi2 or gaudi3.
        legacy_scales: As in ``--additional-config``.
    """
    options = {"device": device}
    if legacy_scales:
        options["legacy_scales"] = legacy_scales
    layers = {name: _stand_in(folder) for name in folder.attention_layers}
    loader = None
    with _said() as said:
        try:
            loader = ScaleLoader(
                {f"model.{name}.self_attn.attn": s for name, s in layers.items()},
                # No model: QUANT_CONFIG of this environment is not looked at.
                SimpleNamespace(
                    additional_config={"fp8_inc": options}, model_config=None
                ),
                _model_config(folder),
            )
            tensors = ((key, tensor) for _, key, tensor in folder.scale_tensors)
            list(loader.keep_back(tensors))
            loader.finish()
        except ValueError as error:
            adjustment = loader.adjustment if loader else None
            return Verdict(device, str(error), adjustment, said=tuple(said))
    scales = {name: layer.impl.scales for name, layer in layers.items()}
    loaded = tuple(name for name, s in scales.items() if s.source != "unit scales")
    return Verdict(device, None, loader.adjustment, loaded, scales, tuple(said))


def _stand_in(folder: Folder) -> SimpleNamespace:
    """What the loader looks at of an attention layer."""
    text = folder.text_config
    heads = text.get("num_attention_heads", 1)
    layer = SimpleNamespace(
        impl=SimpleNamespace(scales=None),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
    )
    if folder.is_mla:
        layer.num_kv_heads = 1
        layer.kv_lora_rank = text["kv_lora_rank"]
    return layer


def _model_config(folder: Folder) -> SimpleNamespace:
    return SimpleNamespace(
        dtype=folder.dtype,
        model=str(folder.path),
        hf_config=SimpleNamespace(
            quantization_config=folder.quantization,
            model_type=folder.config.get("model_type"),
        ),
        hf_text_config=SimpleNamespace(**folder.text_config),
    )


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Collects what vLLM logs instead of writing it."""
    logger = logging.getLogger("vllm")
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before, level = logger.handlers[:], logger.level
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
