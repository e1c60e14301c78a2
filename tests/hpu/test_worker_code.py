# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Our model of the HPU worker beside the worker's own code.

Runs where VLLM_GAUDI names a checkout of vllm-gaudi 091bbadd. Two of its modules are
loaded, extension/utils.py and extension/ops.py, with stand-ins for what they import of
Intel's bridge and of the worker's configuration.
"""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.hpu_worker import WorkerCache, WorkerDecode
from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import BLOCK, batch_of, empty_cache, random, relative_error
from vllm.fp8_inc.hpu_ops import ByteCounter

CHECKOUT = os.environ.get("VLLM_GAUDI")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="set VLLM_GAUDI to a checkout of vllm-gaudi"
)
LATENT, ROPE, HEADS, SCALE = 512, 64, 4, 0.08


def module(monkeypatch, name, **attributes):
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def worker(device, monkeypatch):
    """The worker's extension.ops and extension.utils, and its configuration."""
    config = SimpleNamespace(
        use_contiguous_pa=False,
        fused_block_softmax=False,
        fused_block_softmax_adjustment=False,
        fp32_softmax=False,
        per_token_kv_scaling_support=False,
    )
    kinds = SimpleNamespace(synDeviceGaudi2="gaudi2", synDeviceGaudi3="gaudi3")
    bridge = "habana_frameworks"
    module(monkeypatch, bridge)
    module(monkeypatch, f"{bridge}.torch")
    module(monkeypatch, f"{bridge}.torch.core")
    module(monkeypatch, f"{bridge}.torch.utils")
    module(
        monkeypatch,
        f"{bridge}.torch.utils.experimental",
        _get_device_type=lambda: device,
        synDeviceType=kinds,
    )
    module(monkeypatch, "vllm_gaudi", __path__=[f"{CHECKOUT}/vllm_gaudi"])
    package = [f"{CHECKOUT}/vllm_gaudi/extension"]
    module(monkeypatch, "vllm_gaudi.extension", __path__=package)
    module(monkeypatch, "vllm_gaudi.extension.runtime", get_config=lambda: config)
    names = ("logger", "scales", "utils", "ops")
    for name in names:
        monkeypatch.delitem(sys.modules, f"vllm_gaudi.extension.{name}", raising=False)
    import vllm.model_executor.layers.quantization as quantization

    monkeypatch.setattr(
        quantization, "get_quantization_config", quantization.get_quantization_config
    )
    utils, ops = (
        importlib.import_module(f"vllm_gaudi.extension.{name}")
        for name in ("utils", "ops")
    )
    yield SimpleNamespace(utils=utils, ops=ops, config=config)
    for name in names:
        sys.modules.pop(f"vllm_gaudi.extension.{name}", None)


def decode_with(worker, kind, scales, arguments):
    """The worker's MLA decode; every operand of its products has the scale given."""
    cache = worker.utils.VLLMFP8KVCache(scales["k"])
    products = {
        name: worker.utils.FP8Matmul(*scales[name])
        for name in ("qk", "av", "over_blocks")
    }
    if kind == "bf16":
        cache = worker.utils.VLLMKVCache()
        products = dict.fromkeys(products, worker.utils.Matmul())
    return worker.ops.flat_pa_mla(
        **arguments,
        matmul_qk_op=products["qk"],
        matmul_av_op=products["av"],
        batch2block_matmul_op=products["over_blocks"],
        block2batch_matmul_op=products["over_blocks"],
        keys_fetch_func=cache.fetch_from_cache,
        values_fetch_func=None,
    )


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("lengths", [[300, 90], [16 * BLOCK, 5]])
def test_the_model_computes_what_the_worker_computes(worker, device, kind, lengths):
    batch = batch_of(lengths, contiguous=False)
    maximum = MAXIMUM[device]
    k, q = 2.0**-3 * maximum, 2.0**-2 * maximum
    cache = empty_cache(batch, LATENT + ROPE)
    rows = random(len(batch.slots), LATENT + ROPE, seed=1)
    if kind == "bf16":
        cache = torch.zeros(cache.shape).bfloat16()
        model = WorkerDecode.bf16(False, True)
    else:
        model = WorkerDecode.fp8(q, k, k, False, True)
    model.k_cache.write(rows, cache, batch.slots)
    arguments = {
        "query": random(len(lengths), HEADS, LATENT + ROPE, seed=2),
        "key_cache": cache[:, None],
        "value_cache": None,
        "scale": SCALE,
        "kv_lora_rank": LATENT,
        **batch.decode_arguments(),
    }
    # The worker's index_reduce_ wraps -1; torch's does not.
    arguments["block_groups"] = torch.where(
        batch.block_groups < 0, len(lengths), batch.block_groups
    )
    one = torch.tensor(1.0)
    tensor = {"q": torch.tensor(q), "k": torch.tensor(k)}
    scales = {
        "k": tensor["k"],
        "qk": (tensor["q"], tensor["k"]),
        "av": (one, tensor["k"]),
        "over_blocks": (one, one),
    }
    with ByteCounter() as theirs:
        expected = decode_with(worker, kind, scales, arguments)
    with ByteCounter() as ours:
        out = model(**arguments)
    assert relative_error(out, expected.float()) < 0.01
    assert ours.total == pytest.approx(theirs.total, rel=0.1)


def test_the_context_under_contiguous_pa(worker, device):
    """Defect 3 in the worker's own cache: MLA never sets _fetch_by_id."""
    worker.config.use_contiguous_pa = True
    cache = torch.arange(6 * BLOCK).view(6, BLOCK, 1).bfloat16()
    blocks = torch.tensor([4, 1])
    theirs = worker.utils.VLLMKVCache().fetch_from_cache(cache, blocks)
    model = WorkerCache(None, contiguous=True).fetch(cache, blocks)
    assert torch.equal(theirs, model)
    assert not torch.equal(theirs, cache[blocks])
