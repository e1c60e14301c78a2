# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""tools/patches.py: the rules of a patch, export, tables, rebase."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forkbuild.devtree import DevTree
from forkbuild.fork import ForkError

TEN = "@@ -10 +10 @@ line_9 = 9\n-line_10 = 10\n+line_10 = 11\n"
_PATH = Path(__file__).resolve().parents[2] / "tools" / "patches.py"
_SPEC = importlib.util.spec_from_file_location("patches_cli", _PATH)
patches_cli = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(patches_cli)


@pytest.fixture
def cli(small_fork, capsys):
    """Runs tools/patches.py on the small fork; returns exit code and output."""

    def run(*args: str) -> tuple[int, str]:
        code = patches_cli.main(list(args), small_fork.root)
        out, err = capsys.readouterr()
        return code, out + err

    return run


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_good_fork_passes(small_fork, cli):
    small_fork.patch()
    assert cli("table")[0] == 0
    code, out = cli("check")
    assert (code, out.count("\n")) == (0, 1), out


def test_an_empty_series_passes(cli):
    assert cli("table")[0] == 0
    assert cli("check")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Kind: by-design\n", "", "ten.patch: header field Kind is missing"),
        ("Kind: by-design", "Kind: fun", "Kind must be one of"),
        ("Forwarded: not-needed", "Forwarded: maybe", "Forwarded must be"),
        ("Kind:", "Kinder:", "'Kinder: by-design' is not one of these fields"),
        ("-line_10 = 10\n", "-line_10 = 12\n", "hunk 1 (line 10) matches nowhere"),
        ("+line_10 = 11\n", "+line_10 = (\n", "vllm/config.py does not compile"),
        ("@@ -10 +10 @@", "@@ -9 +9 @@", "run `tools/patches.py export`"),
        ("@@ line_9 = 9", "@@", "run `tools/patches.py export`"),
        ("vllm/config.py", "vllm/gone.py", "has no file vllm/gone.py"),
    ],
)
def test_check_refuses(old, new, message, small_fork, cli):
    rewrite(small_fork.patch(), old, new)
    code, out = cli("check")
    assert code == 1
    assert "ten.patch" in out and message in out


def test_a_large_patch_says_why(small_fork, cli):
    added = "".join(f"+x{number} = 0\n" for number in range(10))
    body = f"@@ -10 +10,10 @@ line_9 = 9\n-line_10 = 10\n{added}"
    path = small_fork.patch()
    rewrite(path, TEN, body)
    code, out = cli("check")
    assert code == 1 and "11 changed lines" in out
    rewrite(path, "Kind:", "Size: It cannot be less.\nKind:")
    cli("table")
    assert cli("check")[0] == 0


def test_collision_of_overlay_and_upstream(small_fork, cli):
    small_fork.write("vllm/cli/__init__.py", "")
    code, out = cli("check")
    assert code == 1 and "vllm/cli/__init__.py: upstream has this file too" in out
    with pytest.raises(ForkError, match="vllm/cli/__init__.py"):
        _ = small_fork.build().overlay


def test_series_and_folder_must_agree(small_fork):
    series = small_fork.root / "patches/vllm/series"
    path = small_fork.patch()
    series.write_text("")
    with pytest.raises(ForkError, match="ten.patch: not listed"):
        _ = small_fork.build().patched
    series.write_text("ten.patch\nten.patch\n")
    with pytest.raises(ForkError, match="ten.patch is listed more than once"):
        _ = small_fork.build().patched
    series.write_text("ten.patch\n")
    path.unlink()
    with pytest.raises(ForkError, match="ten.patch is listed, but"):
        _ = small_fork.build().patched
    series.unlink()
    with pytest.raises(ForkError, match="series: missing"):
        _ = small_fork.build().patched


def test_two_patches_of_one_file_are_refused(small_fork):
    text = small_fork.patch().read_text()
    small_fork.patch("other.patch", text.replace("10", "20"))
    with pytest.raises(ForkError, match="other.patch and ten.patch both change"):
        _ = small_fork.build().patched


def test_table_check_detects_a_stale_table(small_fork, cli):
    readme = small_fork.write(
        "README.md", "Top\n<!-- patches:begin -->\n<!-- patches:end -->\nBottom\n"
    )
    path = small_fork.patch()
    assert cli("table", "--check")[0] == 1
    assert cli("table")[0] == 0
    assert cli("table", "--check")[0] == 0
    assert "[Line ten is eleven](patches/vllm/ten.patch)" in readme.read_text()
    assert readme.read_text().startswith("Top\n")
    assert readme.read_text().endswith("-->\nBottom\n")
    assert "](vllm/ten.patch)" in (small_fork.root / "patches/README.md").read_text()
    rewrite(path, "Subject: Line ten", "Subject: Line nine")
    code, out = cli("check")
    assert code == 1 and "README.md: table is stale" in out


def test_export_round_trip(small_fork, cli):
    path = small_fork.patch()
    before = path.read_text()
    dev = DevTree(small_fork.build()).refresh()
    assert cli("export", "--check")[0] == 0
    rewrite(dev / "vllm/config.py", "line_20 = 20\n", "line_20 = 21\n")
    assert cli("export", "--check") == (1, "ten.patch: differs from build/dev\n")
    assert path.read_text() == before
    assert cli("export")[0] == 0
    expected = before + "@@ -20 +20 @@ line_19 = 19\n-line_20 = 20\n+line_20 = 21\n"
    assert path.read_text() == expected
    assert cli("export", "--check")[0] == 0
    DevTree(small_fork.build()).refresh()
    assert cli("export", "--check")[0] == 0


def test_export_fills_a_patch_that_has_a_header_only(small_fork, cli):
    dev = DevTree(small_fork.build()).refresh()
    path = small_fork.patch()
    path.write_text(path.read_text().partition("@@")[0])
    with pytest.raises(ForkError, match="ten.patch: no hunk yet"):
        _ = small_fork.build().patched
    code, out = cli("export")
    assert code == 1 and "build/dev/vllm/config.py is as upstream has it" in out
    rewrite(dev / "vllm/config.py", "line_10 = 10", "line_10 = 11")
    assert cli("export")[0] == 0
    assert path.read_text().endswith(TEN)


def test_export_refuses_what_no_patch_owns(small_fork, cli):
    small_fork.patch()
    dev = DevTree(small_fork.build()).refresh()
    (dev / "vllm/__init__.py").write_text("x = 1\n")
    code, out = cli("export")
    assert code == 1 and "build/dev/vllm/__init__.py: changed, but no patch" in out
    (dev / "vllm/__init__.py").write_text("")
    (dev / "vllm/new.py").write_text("")
    assert "vllm/new.py: upstream has no such file" in cli("export")[1]


def test_export_does_not_write_over_a_newer_patch(small_fork, cli):
    path = small_fork.patch()
    DevTree(small_fork.build()).refresh()
    rewrite(path, "= 11", "= 12")
    code, out = cli("export")
    assert code == 1 and "ten.patch: newer than build/dev" in out
    assert "= 12" in path.read_text()


def test_rebase_report(small_fork, cli, tmp_path):
    path = small_fork.patch()
    assert cli("rebase", str(small_fork.wheel)) == (0, "ten.patch: applies\n")
    text = zipfile.ZipFile(small_fork.wheel).read("vllm/config.py").decode()

    def rebase(new: str) -> tuple[int, str]:
        (tmp_path / "next/vllm").mkdir(parents=True, exist_ok=True)
        (tmp_path / "next/vllm/config.py").write_text(new)
        return cli("rebase", str(tmp_path / "next"))

    code, out = rebase("new = 0\n" + text)
    assert (code, out) == (
        0,
        f"{path.name}: applies at another line (hunk 1: 10 -> 11)\n",
    )
    code, out = rebase(text + "line_10 = 10\n")
    assert code == 0 and "LOOK: hunk 1 matches 2 times" in out
    code, out = rebase(text.replace("line_10", "line_x"))
    assert code == 1 and "FAILS" in out and "hunk 1" in out
    (tmp_path / "next/vllm/config.py").unlink()
    code, out = cli("rebase", str(tmp_path / "next"))
    assert code == 1 and "there is no vllm/config.py" in out


def test_check_of_vllm_gaudi_in_a_checkout(small_fork, cli, tmp_path):
    text = (
        small_fork.patch().read_text().replace("vllm/config.py", "vllm_gaudi/config.py")
    )
    small_fork.write("patches/vllm_gaudi/ten.patch", text)
    small_fork.write("patches/vllm_gaudi/series", "ten.patch\n")
    (tmp_path / "gaudi/vllm_gaudi").mkdir(parents=True)
    target = tmp_path / "gaudi/vllm_gaudi/config.py"
    target.write_text(zipfile.ZipFile(small_fork.wheel).read("vllm/config.py").decode())
    cli("table")
    assert cli("check", "--vllm-gaudi", str(tmp_path / "gaudi"))[0] == 0
    target.write_text("")
    code, out = cli("check", "--vllm-gaudi", str(tmp_path / "gaudi"))
    assert code == 1 and "vllm_gaudi/config.py: hunk 1" in out


def test_the_script_runs_alone():
    out = subprocess.check_output([sys.executable, str(_PATH), "--help"], text=True)
    assert "rebase" in out
