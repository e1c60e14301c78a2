# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`compare` sees a bad scale, and calls noise noise."""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.checkpoints import checkpoint, kv_scales, llama_config, weights, write
from tests.engines import ask, engine, prompt
from tests.kv_scales.command import call, examples
from vllm.fp8_inc.comparison import tasks
from vllm.fp8_inc.comparison.arms import arm_options
from vllm.fp8_inc.comparison.forced import ForcedWorker
from vllm.fp8_inc.comparison.statistics import Difference, paired, recovery, student
from vllm.fp8_inc.sources.folder import Folder

TINY = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v2-fp8"


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    lines = [" ".join(str((7 * i * i + n) % 128) for i in range(30)) for n in range(6)]
    path.write_text("\n".join(lines))
    return path


def own_words(path: str, texts: Path) -> None:
    """Makes the texts what the model says: only then is a damaged one surprised."""
    with engine(path, kv_cache_dtype="auto") as llm:
        answers = ask(llm, [prompt(4, seed) for seed in range(6)], tokens=26)
    texts.write_text("\n".join(" ".join(map(str, a.tokens)) for a in answers))


def forced_nll(path: str, texts: Path) -> list[list[float]]:
    """transformers' own, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    result = []
    for line in texts.read_text().splitlines():
        ids = torch.tensor([[int(word) for word in line.split()]])
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        result.append(nll.tolist())
    return result


def test_a_model_of_nan_is_an_error_and_no_number(tmp_path, capfd, numbered, texts):
    config = llama_config()
    tensors = weights(config)
    tensors["model.norm.weight"][3] = torch.nan
    path = write(tmp_path / "m", config, tensors)
    done = call(capfd, "compare", path, "--text", texts, "--format", "json")
    assert (done.code, done.out) == (1, "")
    assert "texts.txt, text 1: the model gives no probability to token 2" in done.err


def test_a_scale_that_saturates_is_seen(tmp_path, capfd, numbered, texts):
    scales = {k: s / 2000 for k, s in kv_scales(llama_config()).items()}
    path = checkpoint(tmp_path / "m", "gqa", scales)
    own_words(path, texts)
    out, work = tmp_path / "r" / "out.json", tmp_path / "work"
    words = ["compare", path, "--arms", "bf16,fp8-unit,fp8-loaded", "--text", texts]
    words += ["--output-json", out, "--work-dir", work, "--format", "json"]
    done = call(capfd, *words)
    assert done.code == 1, done.err
    bf16, unit, loaded = done.json["arms"]
    assert json.loads(out.read_text()) == done.json
    plain = write(tmp_path / "plain", llama_config(), weights(llama_config()))
    expected = [x for text in forced_nll(plain, texts) for x in text]
    nll = torch.tensor(bf16["perplexity"]).log().item()
    assert bf16["tokens"] == len(expected) == 6 * 29
    assert nll == pytest.approx(statistics.fmean(expected), rel=0.01)
    # Unit scales hold what lies between 2^-9 and 448; 1e-5 x 448 holds nothing.
    assert unit["kl_mean"] < 0.05 < 0.5 < loaded["kl_mean"] < loaded["kl_p99"]
    assert unit["top1_agreement_pct"] > 80 > loaded["top1_agreement_pct"]
    assert (bf16["verdict"], loaded["verdict"]) == ("reference", "worse")
    assert unit["verdict"] != "worse"


def test_arms_differ_in_the_cache_alone(tmp_path):
    """FP8 weights of the reference have the device's numbers, too."""
    folder = Folder.open(str(checkpoint(tmp_path / "model", "gqa")))
    arms = ("bf16", "fp8-unit", "fp8-loaded")
    options = [arm_options(arm, folder, "gaudi2", tmp_path) for arm in arms]
    assert [each.pop("kv_cache_dtype") for each in options] == [
        "auto",
        "fp8_inc",
        "fp8_inc",
    ]
    assert options[1]["additional_config"]["fp8_inc"].pop("legacy_scales")
    same = {"additional_config": {"fp8_inc": {"device": "gaudi2"}}}
    assert options == [same] * 3


def test_finished_arms_are_not_run_again(tmp_path, capfd, numbered, texts, monkeypatch):
    from vllm.fp8_inc.comparison import text

    ran, run_arm = [], text.run_arm

    def counted(model, options, *args):
        ran.append(options["kv_cache_dtype"])
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run_arm(model, options, *args)

    monkeypatch.setattr(text, "run_arm", counted)
    path = checkpoint(tmp_path / "m", "gqa")
    words = ["compare", path, "--text", texts, "--work-dir", tmp_path / "w"]
    assert call(capfd, *words).code == 130
    assert call(capfd, *words).code == 0
    assert ran == ["auto", "fp8_inc", "fp8_inc"]
    assert call(capfd, *words, "--limit", "3").code == 0
    assert ran[3:] == ["auto", "fp8_inc"]


def test_the_divergence_is_kullback_and_leibler_s(tmp_path):
    generator = torch.Generator().manual_seed(0)
    here, there = torch.randn(2, 5, 7, generator=generator)
    save_file({"hidden": here}, tmp_path / "0.safetensors")
    worker = ForcedWorker()
    worker.rank = 0
    worker.model_runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=lambda hidden: 3 * hidden)
    )
    worker._passes = [there]
    tokens = [1, 4, 0, 6, 2]
    found = worker.kv_forced_take(tokens, None, str(tmp_path / "0.safetensors"))
    p, q = (torch.distributions.Categorical(logits=3 * x[:4]) for x in (here, there))
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(torch.tensor(found["kl"]), expected)
    nll = -q.log_prob(torch.tensor(tokens[1:]))
    torch.testing.assert_close(torch.tensor(found["nll"]), nll)
    same = (here.argmax(-1) == there.argmax(-1))[:4]
    assert found["same"] == same.double().tolist()


def test_the_interval_is_student_s():
    stats = pytest.importorskip("scipy.stats")
    for freedom, tolerance in ((2, 0.04), (5, 0.002), (30, 1e-5)):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), tolerance)
    arm, reference = [1.0, 2.5, 2.0, 4.0, 7.0, 1.5], [0.5, 2.0, 2.5, 3.0, 7.5, 1.0]
    found = paired(arm, reference)
    interval = stats.ttest_rel(arm, reference).confidence_interval()
    assert found.mean == pytest.approx((interval.low + interval.high) / 2)
    assert found.half_width == pytest.approx(
        (interval.high - interval.low) / 2, rel=0.002
    )


@pytest.mark.parametrize(
    "mean, half, higher, verdict",
    [
        (0.1, 0.2, True, "within noise"),
        (0.3, 0.2, True, "better"),
        (-0.3, 0.2, True, "worse"),
        (0.3, 0.2, False, "worse"),
        (0.0, 0.0, True, "equal"),
    ],
)
def test_verdicts(mean, half, higher, verdict):
    assert Difference(mean, half, 9).verdict(higher) == verdict


def test_recovery_is_in_percent_of_the_reference():
    assert recovery(0.45, 0.5) == pytest.approx(90)
    assert recovery(2.5, 2.0, higher_is_better=False) == pytest.approx(80)
    assert recovery(0.1, 0.0) is None


def lm_eval_row(answers: list[float]) -> dict:
    return {
        "task": "t",
        "version": 1,
        "filter": "none",
        "n_shot": 0,
        "metric": "acc",
        "higher_is_better": True,
        "value": statistics.fmean(answers),
        "stderr": 0.1,
        "answers": answers,
    }


def test_tasks_are_paired_by_question():
    arms = {
        "bf16": {"rows": [lm_eval_row([1.0, 1.0, 0.0, 1.0])]},
        "fp8-loaded": {"rows": [lm_eval_row([1.0, 0.0, 0.0, 1.0])]},
    }
    row = tasks.table(arms).records[1]
    assert (row["difference"], row["questions"]) == (-0.25, 4)
    assert row["recovery_pct"] == pytest.approx(200 / 3)
    assert row["verdict"] == "within noise"


def local_task(folder: Path) -> Path:
    """A task of lm-eval with its data beside it."""
    rows = [
        {
            "question": f"Question: Lena has {a} apples. Lena buys {b} more apples. "
            "How many apples does Lena have now?\nAnswer:",
            "answer": str(a + b),
        }
        for a, b in ((23, 45), (12, 7), (31, 20), (44, 13))
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / "task.yaml"
    path.write_text(f"""\
task: apples
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder / "data.jsonl"}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 48, temperature: 0.0}}
filter_list:
  - name: last-number
    filter:
      - {{function: regex, regex_pattern: "#### (\\\\d+)"}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
""")
    return path


@pytest.mark.slow
def test_a_local_task_of_lm_eval(tmp_path, capfd, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["--tasks", local_task(tmp_path), "--max-model-len", "512"]
    done = call(capfd, "compare", TINY, *words, "--format", "json")
    assert done.code == 0, done.err
    bf16, loaded = done.json["arms"]
    assert (bf16["tasks"], bf16["filter"]) == ("apples", "last-number")
    assert bf16["metric"] == "exact_match" and bf16["questions"] == 4
    assert bf16["value"] >= 0.75 and loaded["value"] >= 0.5


@pytest.mark.parametrize(
    "words, said",
    [
        (["--text", "nowhere.txt"], "no such file"),
        ([], "one of --tasks and --text"),
        (["--text", "a", "--arms", "bf16,fp8-dynamic"], "static scales only"),
        (["--text", "a", "--arms", "fp8-loaded,bf16"], "bf16 first"),
        (["--text", "a", "--arms", "bf16,int4"], "known are bf16, fp8-unit"),
    ],
)
def test_wrong_usage(capfd, words, said):
    done = call(capfd, "compare", TINY, *words)
    assert done.code == 2 and said in done.err


@pytest.mark.slow
@pytest.mark.parametrize("words", examples("compare"))
def test_the_examples_of_help(tmp_path, capfd, words, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(['{"text": "Question: Lena has 23 apples."}'] * 3))
    places = {"MODEL": TINY, "texts.jsonl": path, "task.yaml": local_task(tmp_path)}
    done = call(capfd, *(places.get(word, word) for word in words))
    assert done.code in (0, 1) and "against bf16" in done.out, done.err
