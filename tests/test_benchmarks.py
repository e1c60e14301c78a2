# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The experiments measure what they say: models, formats, texts and tables."""

import json
import math
import random
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import (
    gqa,
    kernel_tables,
    latent_range,
    live,
    load_table,
    prefix_hits,
    query_scales,
    report,
    request_table,
    serving_page,
    speed_table,
)
from benchmarks.embedded import BF16, FP8
from benchmarks.record import Record, write_between
from benchmarks.rescaled import Rescaling, rescale
from tests.device_numbers import MAXIMUM
from vllm.fp8_inc.attention.kernels.writers import HeadsWriter
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.scales import AttentionScales

MIXED = Rescaling((-12, 9, -7, 3), (-12, 0, 5, -3))
TOKENS = torch.tensor([[5, 77, 300, 12, 9, 400, 33, 250]])


def forward(model: Path, dtype: torch.dtype):
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    latents: list[torch.Tensor] = []
    for layer in network.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda _, __, out: latents.append(out)
        )
    with torch.inference_mode():
        return network(TOKENS).logits, latents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rescaled_model_says_the_same_bit_for_bit(tmp_path, dtype):
    model = rescale(BF16, tmp_path / "m", MIXED)
    (before, latents), (after, moved) = forward(BF16, dtype), forward(model, dtype)
    assert torch.equal(after, before)
    for exponent, was, now in zip(MIXED.kv_c, latents, moved, strict=True):
        assert torch.equal(now, was * 2.0**exponent)


def test_a_rescaling_that_does_not_fit_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="kv_a_layernorm.weight times 2\\^-140"):
        rescale(BF16, tmp_path / "m", Rescaling((0, 0, -140, 0), (0,) * 4))
    with pytest.raises(ValueError, match="has 4 layers"):
        rescale(BF16, tmp_path / "m", Rescaling((0,) * 3, (0,) * 3))


def test_calibrated_scales_follow_the_larger_part_of_the_row():
    stored = load_file(FP8 / "model.safetensors")
    k, v = (
        [stored[f"model.layers.{n}.self_attn.{r}_scale"].item() * 240 for n in range(4)]
        for r in "kv"
    )
    down = Rescaling((-12,) * 4, (-12,) * 4)
    found = latent_range.dequant_scales("calibrated", "gaudi3", down, [])
    assert found == pytest.approx([a * 2**-12 / 448 for a in k])
    up = Rescaling((9,) * 4, (0,) * 4)
    found = latent_range.dequant_scales("calibrated", "gaudi2", up, [])
    assert found == pytest.approx([a * 2**9 / 240 for a in v])
    assert latent_range.dequant_scales("unit", "gaudi2", up, [(7.0, 3.0)]) == [1.0]


def test_k_only_scales_follow_k_pe_and_not_kv_c():
    keys = [(6.0, 40.0)] * 4
    for kv_c, k_pe, amax in ((9, 0, 40.0), (-12, -12, 6.0), (0, 2, 160.0)):
        moved = Rescaling((kv_c,) * 4, (k_pe,) * 4)
        found = latent_range.dequant_scales("k-only", "gaudi3", moved, keys)
        assert found == [amax / 448] * 4


ORACLE = {"gaudi2": ml_dtypes.float8_e4m3, "gaudi3": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("device", ORACLE)
def test_the_writers_round_to_nearest_and_towards_zero(device):
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 30
    scale = live.static([0.37])
    product = (x.bfloat16() * scale.quant_scale).float()
    clipped = product.clamp(-MAXIMUM[device], MAXIMUM[device])
    nearest = clipped.numpy().astype(ORACLE[device])
    codes = live.format_of(device, live.NearestEven).cast(x, scale.quant_scale)
    assert numpy.array_equal(codes.numpy(), nearest.view(numpy.uint8))
    truncating = live.format_of(device, live.Truncating)
    codes = truncating.cast(x.bfloat16(), scale.quant_scale).numpy()
    below = codes.view(ORACLE[device]).astype(numpy.float32)
    above = (codes + 1).view(ORACLE[device]).astype(numpy.float32)
    size = numpy.abs(clipped.numpy())
    assert (numpy.abs(below) <= size).all()
    inside = numpy.abs(below) < MAXIMUM[device]
    assert (numpy.abs(above[inside]) > size[inside]).all()
    assert (codes != nearest.view(numpy.uint8)).mean() > 0.3


def test_the_writer_of_an_arm_writes_where_the_engine_s_does():
    fmt = live.format_of("gaudi3", live.Truncating)
    codes = (torch.arange(7 * 2 * 16) % 96 + 16).to(torch.uint8)
    numbers = fmt.decode(codes).view(7, 2, 16)  # exact, also when halved
    slots = torch.tensor([3, 40, -1, 17, 16, 63, 0])
    scales = AttentionScales(live.static([1.0]), live.static([2.0]), None, "test")
    ours, engines = torch.zeros(2, 4, 2, 16, 32, dtype=torch.uint8)
    live.CastWriter(ours, scales, fmt).write(numbers, -numbers, slots)
    scale = (scales.k.quant_scale, scales.v.quant_scale)
    HeadsWriter(engines, *scale, FORMATS["gaudi3"]).write(numbers, -numbers, slots)
    assert engines.any() and torch.equal(ours, engines)


def test_the_scales_of_a_gqa_model_are_those_of_its_heads():
    amax = {f"layers.{n}": {"k": [1.0 + n, 4.0], "v": [2.0, 1.0]} for n in (10, 2)}
    assert gqa.dequant_scales("head", amax, "k", 448.0)[0] == [3 / 448, 4 / 448]
    assert gqa.dequant_scales("tensor", amax, "k", 240.0) == [[4 / 240], [11 / 240]]
    assert gqa.dequant_scales("unit", amax, "v", 240.0) == [[1.0], [1.0]]


def test_texts_to_calibrate_on_and_to_compare_on_are_apart():
    calibrate, compare = gqa.topics()
    assert len(calibrate) > 60 < len(compare)
    assert not set(calibrate) & set(compare)


def test_an_observed_model_says_what_it_said(monkeypatch):
    """The attention function that measures q computes the same attention."""
    seen = query_scales.observe(BF16, (["12+3=15. " * 4], ["31-7=24. " * 4]), 32)
    errors = query_scales.figures(seen)
    # K and V in FP8 alone cost 2^-4 of a value at most; q in FP8 adds to that.
    plain = errors["gaudi2, not quantised"]["median"]
    assert 1e-5 < plain < 0.02
    assert errors["gaudi2, per row"]["median"] > plain / 2
    for roles in seen.amax.values():
        assert roles["q"].shape == (4,) and roles["k"].shape == roles["v"].shape == (1,)


def arm(right: list[float], nll: float, kl: list[float]) -> dict:
    """An arm of the request's table, with one filter and four texts of two tokens."""
    row = {"filter": "strict-match", "value": sum(right) / 4, "stderr": 0.2}
    forced = [
        {"nll": [nll, nll + n], "kl": [x, x] if kl else [], "same": [1.0, 0.0]}
        for n, x in enumerate(kl or [0.0] * 4)
    ]
    return {"rows": [row | {"answers": right}], "forced": forced}


def test_the_request_s_table_pairs_questions_and_texts():
    base = arm([1, 1, 0, 1], 1.0, [])
    worse = arm([1, 0, 0, 1], 1.5, [0.1, 0.2, 0.3, 0.4])
    shown = request_table.figures(worse, base)
    assert (shown["strict-match"], shown["strict-match difference"]) == (0.5, -0.25)
    assert shown["strict-match stderr"] == 0.2
    assert shown["forced kl_mean"] == pytest.approx(0.25)
    assert shown["forced nll_difference"] == pytest.approx(0.5)
    assert shown["forced top1_agreement_pct"] == 50
    alone = request_table.figures(base, base)
    assert alone["strict-match difference"] == 0 and "forced kl_mean" not in alone
    assert alone["perplexity"] == pytest.approx(math.exp(1.75), rel=1e-5)
    content = {"settings": {}, "rows": {"bf16": alone, "fp8-unit, gaudi2": shown}}
    first, second = report.request_table(content).splitlines()[2:]
    assert first.startswith("| bf16 | - ± - | 0.7500 ± 0.2000 |  |")
    assert "| 0.5000 ± 0.2000 | -0.2500 ± 0.7" in second


def test_a_record_keeps_finished_arms_of_the_same_settings(tmp_path):
    path = tmp_path / "results" / "r.json"
    Record(path, {"n": 3}).add("a", {"kl": 0.5})
    again = Record(path, {"n": 3})
    again.add("b", {"kl": 0.25})
    assert "a" in again and json.loads(path.read_text())["rows"].keys() == {"a", "b"}
    assert "a" not in Record(path, {"n": 4})
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_text_between_marks_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("a\n<!-- t:begin -->\nold\n<!-- t:end -->\nb\n")
    write_between(page, "t", "new")
    assert page.read_text() == "a\n<!-- t:begin -->\nnew\n<!-- t:end -->\nb\n"
    with pytest.raises(ValueError, match="no marks u:begin"):
        write_between(page, "u", "new")


def test_results_name_no_folder_and_no_host():
    for path in report.RESULTS.glob("*.json"):
        text = path.read_text()
        assert not re.search(r'["\s=]/\w', text), path
        result = json.loads(text)
        assert "machine" in result.get("settings", result)


def test_the_tables_of_the_documents_are_current(monkeypatch):
    written = {}

    def write(page: Path, name: str, text: str) -> None:
        written[page, name] = text

    pages = (report, load_table, kernel_tables, serving_page, speed_table, prefix_hits)
    for module in pages:
        monkeypatch.setattr(module, "write_between", write)
    monkeypatch.setattr(report, "plot", lambda content: None)
    report.main()
    load_table.main()
    speed_table.main()
    for module, name in (
        (kernel_tables, "kernels"),
        (serving_page, "serving"),
        (prefix_hits, "prefix-hits"),
    ):
        module.write(json.loads((report.RESULTS / f"{name}.json").read_text()))
    assert len(written) >= len(pages)
    for (page, name), text in written.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        assert page.read_text().split(begin)[1].split(end)[0] == f"{text}\n"


@pytest.fixture
def trainer(monkeypatch):
    """The generator of problems, as a module would be found from its own folder."""
    root = BF16.parent
    monkeypatch.syspath_prepend(str(root / "train"))
    monkeypatch.syspath_prepend(str(root / "tasks"))
    yield root / "tasks"
    for name in ("write_problems", "batches", "documents", "problems", "problem_kinds"):
        sys.modules.pop(name, None)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_problem_of_the_task_is_held_out_and_right(trainer):
    from problems import calculations, grade, is_held_out

    asked = rows(trainer / "problems.jsonl")
    assert len(asked) == len({row["question"] for row in asked}) == 1319
    for row in asked:
        assert len(calculations(row["answer"])) == row["steps"]
        assert all(map(is_held_out, calculations(row["answer"])))
        last = row["answer"].split("####")
        assert grade(row["answer"], int(last[1]))
        assert last[0].split("=")[-1].startswith(last[1].strip())
    for row in rows(trainer / "shots.jsonl"):
        assert not any(map(is_held_out, calculations(row["answer"])))


def test_training_shows_no_calculation_of_the_task(trainer):
    from batches import BatchSource
    from problems import calculations
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BF16)
    ids, _, _ = BatchSource(tokenizer, seed=5).batch(400, 384)
    shown = set(calculations("\n".join(tokenizer.batch_decode(ids))))
    assert len(shown) > 3000 and {c for each in shown for c in each} >= set("+-*/")
    answers = [row["answer"] for row in rows(trainer / "problems.jsonl")]
    assert shown.isdisjoint(each for text in answers for each in calculations(text))


def test_the_files_of_the_task_are_what_the_script_writes(trainer):
    from problems import make_problem
    from write_problems import SHOTS_SEED, held_out

    for problem, row in zip(held_out(40), rows(trainer / "problems.jsonl")):
        assert problem.question == row["question"]
    rng = random.Random(SHOTS_SEED)
    for row in rows(trainer / "shots.jsonl"):
        assert make_problem(rng).question == row["question"]


@pytest.mark.slow
def test_a_power_of_two_in_the_latent_is_one_in_the_scale(tmp_path):
    """A row times 2^-9 with scale 1.0 is the trained row with scale 2^9."""
    from vllm.fp8_inc.engine import engine

    model = rescale(BF16, tmp_path / "m", Rescaling((-9,) * 4, (-9,) * 4))
    found = []
    for path, scale in ((model, 1.0), (BF16, 2.0**9), (BF16, 1.0)):
        with engine(str(path), max_num_seqs=1, **live.options(True)) as llm:
            each = [[scale]] * 4
            llm.collective_rpc("kv_set", args=("gaudi2", each, each))
            texts = [TOKENS[0].tolist() * 4]
            found.append(live.forced(llm, texts, tmp_path, reference=True)["nll"])
    assert found[0] == found[1] != found[2]
