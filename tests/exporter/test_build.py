"""medusa-build with TensorRT-RTX, on a graph written by hand: what it writes, and what it says of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import round_graph
from command_checks import BUILD, Commands, contents, unchanged

from medusa_engine.exporter import engine, plan_build, plan_network
from medusa_engine.exporter.builder_library import Library
from medusa_engine.exporter.plan_io import plan_io
from medusa_engine.runtime.manifest import file_sha256, read_manifest
from medusa_engine.runtime.plan import check_plan_files, read_plan

RTX = ("--flavor", "tensorrt-rtx", "--compute-capability", "8.9")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return round_graph.save_bundle(tmp_path_factory.mktemp("handmade") / "model")


@pytest.fixture(scope="module")
def built(bundle: Path) -> tuple[Path, str]:
    """A plan at the default place, built in a process of its own, and what that printed."""
    code = (
        "import sys\n"
        "from medusa_engine.exporter.build_cli import main\n"
        "status = main(sys.argv[1:])\n"
        "print('loaded:', *(n for n in ('torch', 'transformers', 'onnx', 'onnxscript') if n in sys.modules))\n"
        "sys.exit(status)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(bundle), *RTX], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return bundle.with_name("model.plan"), ended.stdout


def test_build_loads_no_torch_and_no_onnx(built: tuple[Path, str]) -> None:
    assert built[1].splitlines()[-1] == "loaded:"


def test_report_says_what_was_built(built: tuple[Path, str]) -> None:
    path, output = built
    lines = output.splitlines()[:-1]
    assert lines[0] == str(path)
    said = dict(line.split("  ", 1) for line in lines[1:])
    said = {label: value.strip() for label, value in said.items()}
    plan = read_plan(path)
    assert said.pop("library") == f"TensorRT-RTX {plan.library_version}, compute capability 8.9"
    assert said.pop("profiles") == "decode: 8 rows; prefill: 1 to 40 rows"
    assert said.pop("compaction") == "function body (tensorrt-rtx has no plugins)"
    assert said.pop("attention") == "fused"
    assert said.pop("graph") == "round, float16, greedy"
    assert [name for name in said if said[name].split()[1:2] == ["s"]] == ["parse", "build"]
    assert said.pop("plan") == f"{path.stat().st_size / 1e6:.0f} MB"
    assert 50 < int(said.pop("peak memory").removesuffix(" MB")) < 5000
    assert said.keys() == {"parse", "build", "self-test"}


def test_sidecar_says_what_the_plan_is(bundle: Path, built: tuple[Path, str]) -> None:
    path = built[0]
    plan = read_plan(path)
    check_plan_files(path, plan)
    assert plan.bundle == read_manifest(bundle)
    assert plan.graph_sha256 == file_sha256(bundle / "round.onnx")
    assert plan.plan == {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert (plan.flavor, plan.compute_capability) == ("tensorrt-rtx", "8.9")
    assert (plan.graph, plan.acceptance, plan.compaction) == ("round", "greedy", "function")
    decode, prefill = plan.profiles
    assert (decode.rows, decode.logit_rows) == ((8, 8, 8), (8, 8, 8))
    assert (prefill.rows, prefill.logit_rows) == ((1, 40, 40), (1, 1, 1))  # max_length is below the default chunk
    assert plan.builder == {
        "workspace_mib": None,
        "version_compatible": False,
        "max_prefill_chunk": 40,
        "attention": "fused",
    }


def test_sidecar_lists_the_tensors_of_the_contract(built: tuple[Path, str]) -> None:
    """The shapes are written out here: S_max = 40 + 8 + 2 + 1, and two stop ids."""
    table = {tensor.name: (tensor.mode, tensor.dtype, tensor.shape) for tensor in read_plan(built[0]).io}
    assert table.pop("input_ids") == table.pop("position_ids") == ("input", "int64", (1, -1))
    assert table.pop("tree_mask") == ("input", "bool", (-1, -1))
    assert table.pop("logit_rows") == ("input", "int64", (-1,))
    assert table.pop("retrieve_indices") == ("input", "int64", (8, 3))
    assert table.pop("tree_indices") == ("input", "int64", (8,))
    assert table.pop("pending_rows") == ("input", "int64", (3,))
    assert table.pop("stop_ids") == ("input", "int64", (2,))
    for name in ("past_length", "pending_count", "token_budget"):
        assert table.pop(name) == ("input", "int64", (1,))
    assert table.pop("finished") == ("input", "bool", (1,))
    for name in ("accepted_tokens", "next_pending_rows"):
        assert table.pop(name) == ("output", "int64", (3,))
    for name in ("accepted_count", "next_token_budget", "next_past_length", "next_pending_count"):
        assert table.pop(name) == ("output", "int64", (1,))
    for name in ("next_input_ids", "next_position_ids"):
        assert table.pop(name) == ("output", "int64", (1, 8))
    assert table.pop("next_finished") == ("output", "bool", (1,))
    for layer in (0, 1):
        for kind in ("key", "value"):
            assert table.pop(f"past_{kind}.{layer}") == ("input", "float16", (1, 2, 51, 16))
            assert table.pop(f"present_{kind}.{layer}") == ("output", "float16", (1, 2, 51, 16))
    assert table == {}


@pytest.mark.parametrize(
    ("acceptance", "more"),
    [
        ("sample", {"uniforms", "temperature", "top_k", "top_p", "min_p"}),
        (
            "typical",
            {"uniforms", "temperature", "top_k", "top_p", "min_p"}
            | {"posterior_threshold", "posterior_alpha", "root_drawn"},
        ),
    ],
)
def test_policies_have_inputs_of_their_own(acceptance: str, more: set[str], bundle: Path) -> None:
    manifest = read_manifest(bundle)
    greedy, other = (set(plan_io(manifest, policy, 0)) for policy in ("greedy", acceptance))
    assert greedy < other
    assert {tensor.name for tensor in other - greedy} == more
    shapes = {tensor.name: tensor.shape for tensor in other}
    assert shapes["uniforms"] == (51,)  # one for each position
    assert shapes["stop_ids"] == (1,)  # there is always room for one


def test_files_beside_the_plan_are_what_the_runtime_reads(bundle: Path, built: tuple[Path, str]) -> None:
    folder = built[0].with_name("model.plan.files")
    names = {"generation_config.json", "tokenizer_config.json", "tree.json"}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        assert (folder / name).read_bytes() == (bundle / name).read_bytes()
    assert {path.name for path in bundle.parent.iterdir()} == {
        "model",
        "model.plan",
        "model.plan.json",
        "model.plan.files",
    }


def test_options_reach_the_plan(bundle: Path, tmp_path: Path, commands: Commands) -> None:
    output = tmp_path / "small.plan"
    options = ("--compute-capability", "12.0", "--max-prefill-chunk", "16", "--workspace-mib", "64", "--no-plugin")
    commands.build(bundle, "-o", output, *options)
    plan = read_plan(output)
    assert plan.compute_capability == "12.0"
    assert plan.profiles[1].rows == (1, 16, 16)
    assert (plan.builder["workspace_mib"], plan.builder["max_prefill_chunk"]) == (64, 16)


def test_attention_without_a_kernel_is_decomposed_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorRT-RTX 1.7 has no fused attention for 8 numbers per head."""
    from medusa_engine.exporter.build_cli import main

    narrow = round_graph.save_bundle(tmp_path / "narrow", head_dim=8)
    assert main([str(narrow), *RTX]) == 0
    output = capfd.readouterr()
    (note,) = (line for line in output.err.splitlines() if line.startswith("note: "))
    assert "no fused kernel for Attention of " in note
    assert "(1, 2, -1, 8)" in note
    assert "attention          decomposed" in output.out
    assert "Internal Error" not in output.err + output.out, "the library's own lines belong to --verbose"
    assert read_plan(tmp_path / "narrow.plan").builder["attention"] == "decomposed"


def test_timing_cache_is_said_to_be_of_no_use(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from medusa_engine.exporter.build_cli import main

    cache = tmp_path / "timings"
    assert main([str(bundle), *RTX, "-o", str(tmp_path / "model.plan"), "--timing-cache", str(cache)]) == 0
    assert "keeps no timing caches" in capfd.readouterr().err
    assert not cache.exists()


def test_verbose_prints_what_the_library_says(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from medusa_engine.exporter.build_cli import main

    assert main([str(bundle), *RTX, "-o", str(tmp_path / "model.plan"), "--verbose"]) == 0
    output = capfd.readouterr()
    assert "Engine generation completed" in output.err
    assert output.out.splitlines()[0] == str(tmp_path / "model.plan")


def test_force_replaces_a_plan_and_nothing_else_does(
    bundle: Path, built: tuple[Path, str], tmp_path: Path, commands: Commands
) -> None:
    path = tmp_path / "model.plan"
    commands.build(bundle, *RTX, "-o", path)
    with unchanged(tmp_path):
        commands.build_refuses(bundle, *RTX, "-o", path, named=[path, "exists already"])
    before = contents(tmp_path)
    commands.build(bundle, *RTX, "-o", path, "--max-prefill-chunk", "8", "--force")
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert after["model.plan.json"] != before["model.plan.json"]
    check_plan_files(path, read_plan(path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_build_leaves_the_earlier_plan(
    number: signal.Signals, bundle: Path, built: tuple[Path, str], tmp_path: Path
) -> None:
    """Stopped inside the library, where Python's handlers do not run."""
    path = tmp_path / "model.plan"
    path.write_bytes(built[0].read_bytes())
    path.with_name("model.plan.json").write_bytes(built[0].with_name("model.plan.json").read_bytes())
    held = (
        "import sys, time\n"
        "from medusa_engine.exporter import plan_build\n"
        "from medusa_engine.exporter.build_cli import main\n"
        "plan_build._build = lambda network, config, settings: build(settings)\n"
        "def build(settings):\n"
        "    import ctypes\n"
        "    with plan_build.native_work(verbose=True):\n"
        "        print('held', file=sys.stderr, flush=True)\n"
        "        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "        library.pthread_mutex_lock(mutex)\n"
        "        library.pthread_mutex_lock(mutex)\n"  # which no signal interrupts
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", held, str(bundle), *RTX, "-o", str(path), "--force"]
    with unchanged(tmp_path):
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGTERM)],
        )
        with process:
            assert process.stderr is not None
            said = ""
            while "held" not in said:
                character = process.stderr.read(1)
                assert character, said
                said += character
            sent = time.monotonic()
            process.send_signal(number)
            process.wait(timeout=60)
            assert time.monotonic() - sent < 30
            said += process.stderr.read()
            codes = {signal.SIGINT: 130, signal.SIGTERM: 128 + number, signal.SIGKILL: -number}
            assert process.returncode == codes[number]
            assert said.endswith("\nmedusa-build: interrupted\n") == (number == signal.SIGINT)
            assert "Traceback" not in said


def test_version_names_the_package() -> None:
    ended = subprocess.run([*BUILD, "--version"], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("medusa-build ")
    assert ended.returncode == 0


def test_sidecar_is_ascii_json(built: tuple[Path, str]) -> None:
    document = json.loads(os.fsdecode(built[0].with_name("model.plan.json").read_bytes()))
    assert document["format"] == "medusa-plan"
    assert document["bundle"]["target"] == "tensorrt"


@pytest.mark.parametrize("wanted", [True, False], ids=["plugin", "no-plugin"])
def test_plugin_is_registered_before_the_graph_is_parsed(
    wanted: bool, bundle: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library that takes it, played by TensorRT-RTX and a parser that says it has found it in every layer."""
    done: list[str] = []
    parse = engine.parse_graph

    def parse_graph(*arguments: Any, **options: Any) -> Any:
        done.append("parse")
        return parse(*arguments, **options)

    monkeypatch.setattr(Library, "has_plugins", True)
    monkeypatch.setattr(engine, "register_plugin", lambda _module, capability: done.append(f"register {capability}"))
    monkeypatch.setattr(engine, "parse_graph", parse_graph)
    for module in (plan_network, plan_build):
        monkeypatch.setattr(module, "plugin_layers", lambda *_arguments: round_graph.LAYERS * ("register 8.9" in done))
    monkeypatch.setattr(plan_build, "allow_aliasing", lambda *_arguments: done.append("allow aliasing"))
    monkeypatch.setattr(plan_build, "_build", lambda *_arguments: np.zeros(1000, dtype=np.uint8))
    path = tmp_path / "model.plan"
    printed = commands.build(bundle, *RTX, "-o", path, *(() if wanted else ("--no-plugin",)))
    assert done == (["register 8.9", "parse", "allow aliasing"] if wanted else ["parse"])
    assert read_plan(path).compaction == ("plugin" if wanted else "function")
    assert ("plugin\n" in printed) == wanted


def test_plugin_that_the_parser_does_not_find_is_an_error(
    bundle: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "has_plugins", True)
    monkeypatch.setattr(engine, "register_plugin", lambda *_arguments: None)
    commands.build_refuses(bundle, *RTX, "-o", tmp_path / "model.plan", named=["0 layers", "not by 2"])
    assert list(tmp_path.iterdir()) == []
