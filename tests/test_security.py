# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""No file of the product can run what it reads; SECURITY.md promises so."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("vllm", "tools", "benchmarks", "examples", "software_gaudi")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# What runs text, or unpickles. A method of that name (model.eval()) is another thing.
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"}
CALLS |= {"os.system", "os.popen", "torch.jit.load", "pandas.read_pickle"}
TRUE = {"shell", "allow_pickle", "trust_remote_code"}


def findings(source: str) -> list[str]:
    """What of these is in a file, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node, a.name) for a in node.names if _top(a.name) in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node, name) for name in names if name in CALLS]
            if _top(node.module or "") in MODULES:
                found.append((node, node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name in BUILTINS:
                found.append((node, name))
            found += [(node, k.arg) for k in node.keywords if _is_true(k)]
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value in TRUE:
                    is_constant = isinstance(value, ast.Constant)
                    found += [(node, key.value)] if is_constant and value.value else []
    return [f"{node.lineno}: {name}" for node, name in found]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_true(keyword: ast.keyword) -> bool:
    value = keyword.value
    return keyword.arg in TRUE and isinstance(value, ast.Constant) and bool(value.value)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import a, dill.x",
        "from torch import load",
        "torch.load(f)",
        "x = np.load(f, allow_pickle=False)",
        "yaml.load(f, Loader=x)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(line, shell=True)",
        "LLM(m, trust_remote_code=True)",
        'options = {"trust_remote_code": True}',
    ],
)
def test_the_reader_finds(line):
    assert findings(line)


def test_the_reader_lets_pass():
    fine = "model.eval(); LLM(m, trust_remote_code=args.x); re.compile('a'); f.load()"
    assert not findings(fine)


def test_no_file_unpickles_or_runs_what_it_reads():
    assert len(FILES) > 100
    found = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := findings(path.read_text()))
    }
    assert not found


def test_patches_add_nothing_of_it():
    for patch in (ROOT / "patches").rglob("*.patch"):
        added = [x[1:] for x in patch.read_text().splitlines() if x.startswith("+")]
        text = "\n".join(added)
        for name in (*MODULES, *CALLS):
            assert not re.search(rf"\b{re.escape(name)}\b", text), (patch, name)


def test_remote_code_is_trusted_nowhere():
    """The option is there, off; no command line of ours, no document, turns it on."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("no git checkout")
    turned_on = re.compile(
        r"--trust-remote-code(?!\", action)|trust_remote_code.: true"
    )
    for name in listed:
        if name.endswith((".py", ".md", ".json", ".yml", "Makefile", "Dockerfile")):
            if name == "tests/test_security.py":
                continue
            assert not turned_on.search((ROOT / name).read_text()), name
