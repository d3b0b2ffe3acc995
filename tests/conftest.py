"""Bundles that several folders of tests share, each exported once. Heavy libraries load when one is asked for."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_model
import pytest
from checkpoints import write_tree
from command_checks import Commands, ExportRefuses, unchanged

from medusa_engine.runtime.engine import Engine

if TYPE_CHECKING:
    from lookup_rounds import Observer
    from soak_rounds import Tally
    from tiny_models import Exported, Rigged


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests that take many minutes")
    parser.addoption("--soak-prompts", type=int, default=200, help="how many prompts tests/test_soak.py answers")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(100_000, 20, 100)  # looking through all that torch has loaded would take a tenth of every export
    config.addinivalue_line("markers", "soak: takes many minutes; runs with --soak only")


def pytest_runtest_setup(item: pytest.Item) -> None:
    set_torch_threads(item)


def pytest_runtest_call(item: pytest.Item) -> None:
    set_torch_threads(item)


def set_torch_threads(item: pytest.Item) -> None:
    """One thread for small models: more would wait for one another, for long where other processes want the cores."""
    if torch := sys.modules.get("torch"):
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(cores if item.get_closest_marker("demo") else 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


SOAK_TALLY = pytest.StashKey["Tally"]()


@pytest.fixture(scope="session")
def soak_tally(pytestconfig: pytest.Config) -> Tally:
    """What the soak counts, for the report at the end."""
    from soak_rounds import Tally

    return pytestconfig.stash.setdefault(SOAK_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Near-ties are said, passed tests or not."""
    tally = config.stash.get(SOAK_TALLY, None)
    if tally is not None:
        terminalreporter.section("soak")
        for line in (str(tally), *tally.near_ties):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def own_heads(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Untied LM projection; three random heads of two residual blocks with projections of their own; every policy."""
    from tiny_models import export, random_heads, random_llama

    folder = tmp_path_factory.mktemp("own_heads")
    random_llama(folder, tied=False, seed=1)
    random_heads(folder, heads=3, layers=2, own_projection=True, scale=0.3, seed=2)
    options = ("--max-length", "600", "--top-k", "5", "--max-tree-nodes", "24", "--acceptance", "sample,typical")
    return export(folder, folder / "bundle", *options)


@pytest.fixture(scope="session")
def every_graph(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The model of `own_heads`, with every policy and the graphs that penalise repetition."""
    from tiny_models import export, random_heads, random_llama

    folder = tmp_path_factory.mktemp("every_graph")
    random_llama(folder, tied=False, seed=1)
    random_heads(folder, heads=3, layers=2, own_projection=True, scale=0.3, seed=2)
    sizes = ("--max-length", "600", "--top-k", "5", "--max-tree-nodes", "24")
    policies = ("--acceptance", "sample,rejection,typical", "--repetition-penalty")
    return export(folder, folder / "bundle", *sizes, *policies)


@pytest.fixture(scope="session")
def shared_heads(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Tied embeddings; two random heads that share the LM projection."""
    from tiny_models import export, random_heads, random_llama

    folder = tmp_path_factory.mktemp("shared_heads")
    random_llama(folder, tied=True, seed=3)
    random_heads(folder, heads=2, layers=1, own_projection=False, scale=0.1, seed=4)
    return export(folder, folder / "bundle", "--max-length", "100", "--top-k", "4", "--max-tree-nodes", "16")


@pytest.fixture(scope="session")
def no_heads(own_heads: Exported) -> Exported:
    """The model of `own_heads` without heads: lookup of four tokens alone; greedy and sample."""
    from tiny_models import export

    tree = own_heads.checkpoint / "lookup.json"
    tree.write_text('[["L"], ["L", "L"], ["L", "L", "L"]]')
    options = ("--no-heads", "--max-length", "100", "--max-tree-nodes", "8", "--acceptance", "sample")
    return export(own_heads.checkpoint, own_heads.checkpoint / "no_heads", *options, tree=tree)


@pytest.fixture(scope="session")
def zero_heads(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Tied embeddings; four zero-initialised heads, which repeat the LM head's own guess."""
    from tiny_models import export, random_llama

    folder = tmp_path_factory.mktemp("zero_heads")
    random_llama(folder, tied=True, seed=6)
    options = ("--untrained-heads", "4", "--max-length", "100", "--top-k", "10", "--max-tree-nodes", "64")
    return export(folder, folder / "bundle", *options)


@pytest.fixture(scope="session")
def rigged_heads() -> Rigged:
    """What the rigged bundles below say."""
    from tiny_models import rigged_model

    return rigged_model()


@pytest.fixture(scope="session")
def rigged_32(tmp_path_factory: pytest.TempPathFactory, rigged_heads: Rigged) -> Exported:
    """The rigged model with a cache of 32 rows and two stop tokens: the 10th and 30th behind token 0."""
    from tiny_models import export, save_rigged

    folder = tmp_path_factory.mktemp("rigged_32")
    behind_0 = rigged_heads.answer([0], 30)
    save_rigged(folder, rigged_heads, eos_token_id=[behind_0[9], behind_0[29]])
    return export(folder, folder / "bundle", "--max-length", "32")


@pytest.fixture(scope="session")
def rigged_64(tmp_path_factory: pytest.TempPathFactory, rigged_heads: Rigged) -> Exported:
    """The rigged model with a cache of 64 rows and no stop token."""
    from tiny_models import export, save_rigged

    folder = tmp_path_factory.mktemp("rigged_64")
    save_rigged(folder, rigged_heads)
    return export(folder, folder / "bundle", "--max-length", "64")


@pytest.fixture(scope="session")
def rigged_96(tmp_path_factory: pytest.TempPathFactory, rigged_heads: Rigged) -> Exported:
    """The rigged model with the stop tokens of `rigged_32`, a cache of 96 rows and trees of up to 24 nodes.

    Its keys and values depend on the whole context, its answer on the last token.
    """
    from tiny_models import export, save_rigged

    folder = tmp_path_factory.mktemp("rigged_96")
    behind_0 = rigged_heads.answer([0], 30)
    save_rigged(folder, rigged_heads, eos_token_id=[behind_0[9], behind_0[29]])
    return export(folder, folder / "bundle", "--max-length", "96", "--max-tree-nodes", "24")


@pytest.fixture(scope="session")
def rigged_fixed(rigged_96: Exported) -> Exported:
    """The model of `rigged_96` for TensorRT, in fp16."""
    from tiny_models import export

    options = ("--max-length", "96", "--max-tree-nodes", "24", "--target", "tensorrt", "--precision", "fp16")
    return export(rigged_96.checkpoint, rigged_96.checkpoint / "fixed", *options)


@pytest.fixture(scope="session", params=["own_heads", "shared_heads", "zero_heads", "rigged_64"])
def any_bundle(request: pytest.FixtureRequest) -> Exported:
    """Each kind of heads in turn."""
    bundle: Exported = request.getfixturevalue(request.param)
    return bundle


@pytest.fixture(scope="session")
def demo_engine() -> Engine:
    """The exported demo model."""
    return Engine.open(demo_model.BUNDLE)


@pytest.fixture(scope="session")
def demo_transformers() -> Any:
    """The demo model in transformers."""
    return demo_model.load_model()


@pytest.fixture
def commands(capfd: pytest.CaptureFixture[str]) -> Commands:
    """The console commands, run in this process."""
    return Commands(capfd)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without tokenizer, whose sizes fit tests/data/artifacts; not to be changed."""
    from checkpoints import save_llama

    return save_llama(tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a tokenizer that adds BOS, and a chat template; a cache of 64 rows."""
    return tokenizer_bundle(tmp_path_factory.mktemp("chat"), "bytelevel_bos_twice")


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer that adds nothing, and no chat template."""
    return tokenizer_bundle(tmp_path_factory.mktemp("plain"), "bytelevel_no_template")


def tokenizer_bundle(folder: Path, tokenizer: str) -> Path:
    """Export a tiny model with one of tests/data/tokenizers: two untrained heads, 4 ranks, 8 nodes."""
    from checkpoints import CHAT_VOCAB, save_llama
    from tiny_models import export

    save_llama(folder / "llama", vocab_size=CHAT_VOCAB, tokenizer=tokenizer)
    options = ("--untrained-heads", "2", "--top-k", "4", "--max-tree-nodes", "8", "--max-length", "64")
    return export(folder / "llama", folder / "bundle", *options).bundle


@pytest.fixture
def model_copy(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture
def export_refuses(tmp_path: Path, commands: Commands) -> ExportRefuses:
    """Check that an export of a model is refused and leaves everything as it was."""
    tree = write_tree(tmp_path / "tree.json")

    def check(model: str | Path, *options: str | Path, named: list[str | Path]) -> None:
        options = options or ("--untrained-heads", "2")
        with unchanged(tmp_path):
            commands.export_refuses(
                "--model", model, "--tree", tree, "-o", tmp_path / "new" / "bundle", *options, named=named
            )

    return check


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    """Of what the rounds of a test look up."""
    from lookup_rounds import observed

    return observed(monkeypatch)
