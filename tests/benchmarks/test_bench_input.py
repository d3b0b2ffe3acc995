"""What medusa-bench is given and cannot use is refused in two lines, before anything is measured or written."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_checks import check_refused, unchanged
from tiny_models import Exported

from medusa_engine.benchmarks.cli import main
from medusa_engine.runtime.manifest import document_sha256

Refuses = Callable[..., None]


@pytest.fixture
def refuses(capfd: pytest.CaptureFixture[str], tmp_path: Path, rigged_64: Exported) -> Refuses:
    """Runs medusa-bench, on the rigged bundle if no other is given, and checks that it refuses."""

    def run(*arguments: str | Path, named: Sequence[str | Path], bundle: Path = rigged_64.bundle) -> None:
        capfd.readouterr()
        with unchanged(tmp_path):
            status = main([str(argument) for argument in ("--engine", bundle, *arguments)])
        output = capfd.readouterr()
        check_refused(status, output.err, "medusa-bench", *named)
        assert output.out == ""

    return run


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--repeats", "0"], ["--repeats", "0"]),
        (["--answer-repeats", "0"], ["--answer-repeats is 0"]),
        (["--answer-repeats", "100"], ["--answer-repeats is 100"]),
        (["--threads", "0"], ["--threads", "0"]),
        (["--threads", "5000"], ["--threads", "5000"]),
        (["--max-new-tokens", "1"], ["--max-new-tokens", "1"]),
        (["--sweep", "1,0"], ["--sweep 0"]),
        (["--sweep", "1,1000"], ["--sweep 1000", "1 to 64"]),
        (["--context", "0", "--sweep", "1"], ["--context 0"]),
        (["--context", "4,61", "--sweep", "1"], ["--context 61", "1 to 60"]),
        (["--sweep", "64"], ["64 nodes", "cache of 64"]),
        (["--tree", "missing.json"], ["missing.json"]),
        (["--against", "transformers"], ["--against"]),
        (["--model", "somewhere"], ["--model"]),
        (["--against", "transformers", "--model", "no/such/model"], ["no/such/model"]),
        (["--prompts", "missing.txt"], ["missing.txt"]),
    ],
)
def test_options_out_of_range(options: list[str], named: list[str], refuses: Refuses) -> None:
    refuses(*options, named=named)


@pytest.mark.parametrize("text", ["1,a", "", "1,,2", "1.5"])
def test_a_list_that_is_none_is_a_usage_error(
    text: str, rigged_64: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--engine", str(rigged_64.bundle), "--sweep", text])
    assert stop.value.code == 2
    assert "not a list of whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", ["holds no prompts"]),
        ("{}", ["holds no prompts"]),
        ('{"a": 3}', ['category "a" is 3, not a list of prompts']),
        ("3", ["is 3, not a list of prompts or an object of such lists"]),
        ('{"together": [[1]]}', ["a category is called", "together"]),
        ('{"a\\u202eb": [[1]]}', ["a category is called"]),
        ('{"a": [[1, 2], [1000]]}', ["prompt 2", "token id"]),
        ('{"a": [[1, -1]]}', ["prompt 1", "token id"]),
        ('{"a": [[]]}', ["prompt 1: is an empty list, not a text, a list of token ids or a list of messages"]),
        ('{"a": [{"text": "x"}]}', ["prompt 1: is an object, not a text"]),
        ('{"a": [null]}', ["prompt 1: is null, not a text"]),
        ('{"a": [[1, 2.5]]}', ["prompt 1: is a list with 2.5 in it, not a text"]),
        ('{"a": [[[1]]]}', ["prompt 1: is a list with a nested list in it, not a text"]),
        ('{"a": ["a text"]}', ["no tokenizer"]),
        (json.dumps([[1] * 63]), ["prompt 1", "63 tokens", "1 to 62"]),
        ("[1, NaN]", ["NaN"]),
    ],
)
def test_prompt_files_that_cannot_be_used(content: str, named: list[str], tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / ("prompts.json" if content else "prompts.txt")
    file.write_text(content)
    refuses("--prompts", file, "--sweep", "1", named=named)


def test_other_weights_than_the_bundles(llama_folder: Path, refuses: Refuses) -> None:
    refuses("--sweep", "1", "--against", "transformers", "--model", llama_folder, named=[llama_folder, "bundle"])


def test_llama_cpp_reads_gguf_files_only(rigged_64: Exported, refuses: Refuses) -> None:
    options = ("--sweep", "1", "--against", "llama-cpp", "--model", rigged_64.checkpoint)
    refuses(*options, named=["llama-cpp", rigged_64.checkpoint])


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="needs llama-cpp-python to be missing")
def test_missing_llama_cpp_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    from medusa_engine.benchmarks.others import LlamaCpp
    from medusa_engine.exporter.checkpoint import Source
    from medusa_engine.runtime.errors import UserError

    with pytest.raises(UserError, match="llama-cpp-python is not installed") as refused:
        LlamaCpp(Source("model", tmp_path, "model.gguf"), context=64, threads=1)
    assert "pip install llama-cpp-python" in refused.value.hint


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--json", "out.txt", ".txt"),
        ("--json", "missing/out.json", "folder"),
        ("--report", "out.pdf", ".pdf"),
        ("--report", "missing/out.html", "folder"),
        ("--figures", "missing/out", "folder"),
    ],
)
def test_outputs_that_cannot_be_written(option: str, value: str, named: str, tmp_path: Path, refuses: Refuses) -> None:
    refuses(option, tmp_path / value, named=[tmp_path / value, named])


def test_a_folder_for_figures_that_is_a_file(tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / "file"
    file.write_text("")
    refuses("--figures", file, named=[file, "is not a folder"])


def test_no_folder_for_figures_is_left_where_nothing_is_measured(tmp_path: Path, refuses: Refuses) -> None:
    refuses("--figures", tmp_path / "new", "--repeats", "0", named=["--repeats is 0"])


def test_a_bundle_that_does_not_tell_what_costs_depend_on(
    rigged_64: Exported, tmp_path: Path, refuses: Refuses
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(rigged_64.bundle, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["sha256"], manifest["model"]["layer_weights"]
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"sha256": document_sha256(manifest)}))
    refuses("--ledger", "--sweep", "1", bundle=bundle, named=["model.layer_weights"])


def test_a_bundle_that_is_not_there(tmp_path: Path, refuses: Refuses) -> None:
    refuses(bundle=tmp_path / "missing", named=[tmp_path / "missing"])
