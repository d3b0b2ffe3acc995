"""medusa-export refuses options and output folders that make no sense, in two lines, and leaves what is there."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import ARTIFACTS, POSITIONS, TREES, VOCAB, write_tree
from command_checks import Commands, check_refused, unchanged
from test_bad_input_prompt import EXPECTED_TREES, NAMED_IN_TREES, REFUSED_TREES

from medusa_engine.runtime.errors import UserError

Refuses = Callable[..., None]


@pytest.fixture
def refuses(tmp_path: Path, llama_folder: Path, commands: Commands) -> Refuses:
    """Check that an export of a good model is refused and leaves everything as it was."""
    good_tree = write_tree(tmp_path / "tree.json")

    def check(
        *options: str | Path, named: list[str | Path], tree: Path = good_tree, output: Path | None = None
    ) -> None:
        output = output or tmp_path / "new" / "bundle"
        options = options if "--heads" in options else ("--untrained-heads", "2", *options)
        with unchanged(tmp_path, llama_folder):
            commands.export_refuses("--model", llama_folder, "--tree", tree, "-o", output, *options, named=named)

    return check


@pytest.mark.parametrize("value", ["0", "-1", str(1 << 40)])
@pytest.mark.parametrize("option", ["--top-k", "--max-length", "--max-tree-nodes", "--untrained-heads"])
def test_size_that_is_none(option: str, value: str, refuses: Refuses) -> None:
    refuses(option, value, named=[option, value])


def test_sizes_beyond_the_model(refuses: Refuses) -> None:
    refuses("--max-length", str(POSITIONS + 1), named=["--max-length", str(POSITIONS + 1), str(POSITIONS)])
    refuses("--top-k", str(VOCAB + 1), named=["--top-k", str(VOCAB + 1), str(VOCAB)])


def test_heads_and_untrained_heads_together(refuses: Refuses) -> None:
    heads = ARTIFACTS / "good_heads.safetensors"
    refuses("--heads", heads, "--untrained-heads", "2", named=["--heads", "--untrained-heads"])


def test_no_heads_at_all(tmp_path: Path, llama_folder: Path, commands: Commands) -> None:
    tree = write_tree(tmp_path / "tree.json")
    commands.export_refuses(
        "--model", llama_folder, "--tree", tree, "-o", tmp_path / "out", named=[llama_folder, "heads"]
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", REFUSED_TREES)
def test_tree_file_that_is_no_tree(name: str, refuses: Refuses) -> None:
    tree = TREES / f"{name}.json"
    named = NAMED_IN_TREES.get(name) or (EXPECTED_TREES[name]["error_must_name"],)
    source = name if name == "bad_deeper_than_2heads" else tree  # the file is a tree, which two heads cannot run
    refuses(tree=tree, named=[source, *named])


@pytest.mark.parametrize(
    ("options", "paths", "named"),
    [
        ((), [[0], [0, 0], [0, 0, 0]], ["depth 3", "2 heads"]),
        (("--top-k", "3"), [[3]], ["rank 3", "ranks 0 to 2", "--top-k 4"]),
        (("--max-tree-nodes", "3"), [[0], [1], [2]], ["4 nodes", "allows 3", "--max-tree-nodes 4"]),
    ],
    ids=["depth", "rank", "nodes"],
)
def test_tree_beyond_the_engine(
    options: tuple[str, ...],
    paths: list[list[int]],
    named: list[str],
    tmp_path: Path,
    llama_folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from medusa_engine.exporter.cli import main

    tree = write_tree(tmp_path / "beyond.json", paths)
    arguments = ["--model", llama_folder, "--tree", tree, "-o", tmp_path / "out", "--untrained-heads", "2", *options]
    status = main([str(argument) for argument in arguments])
    stderr = capfd.readouterr().err
    check_refused(status, stderr, "medusa-export", "tree beyond")
    for text in named:
        assert text in stderr
    assert not (tmp_path / "out").exists()


def test_bundle_that_exists_is_kept_without_force(chat_bundle: Path, tmp_path: Path, refuses: Refuses) -> None:
    output = Path(shutil.copytree(chat_bundle, tmp_path / "bundle"))
    refuses(output=output, named=[output, "exists already"])


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
def test_folder_of_other_files_is_never_replaced(force: tuple[str, ...], tmp_path: Path, refuses: Refuses) -> None:
    output = tmp_path / "thesis"
    output.mkdir()
    (output / "chapter_1.txt").write_text("It was a dark and stormy night.")
    refuses(*force, output=output, named=[output, "not a bundle"])


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
def test_file_at_the_output_is_never_replaced(force: tuple[str, ...], tmp_path: Path, refuses: Refuses) -> None:
    output = tmp_path / "notes.txt"
    output.write_text("Buy milk.")
    refuses(*force, output=output, named=[output, "not a bundle"])


def test_link_to_nowhere_at_the_output(tmp_path: Path, refuses: Refuses) -> None:
    output = tmp_path / "link"
    output.symlink_to(tmp_path / "gone")
    refuses("--force", output=output, named=[output, "not a bundle"])


@pytest.mark.parametrize("below", ["bundle", "deep/bundle"])
def test_output_below_a_file(below: str, tmp_path: Path, refuses: Refuses) -> None:
    (tmp_path / "file").write_text("")
    refuses(output=tmp_path / "file" / below, named=[tmp_path / "file" / below, "not a folder"])


def test_output_where_the_system_makes_no_folders(refuses: Refuses) -> None:
    refuses(output=Path("/proc/bundles/bundle"), named=["/proc/bundles/bundle", "cannot write"])


def test_full_disk_leaves_the_bundle_that_was_there(chat_bundle: Path, tmp_path: Path, refuses: Refuses) -> None:
    output = Path(shutil.copytree(chat_bundle, tmp_path / "bundle"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # a larger file fails as it does on a full disk
    try:
        refuses("--force", output=output, named=[output, "cannot write"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("stage", ["save_tokenizer", "write_generation_config"])
def test_failure_half_way_leaves_nothing(
    stage: str, tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_engine.exporter import export
    from medusa_engine.exporter.cli import main

    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    tree = write_tree(tmp_path / "tree.json")
    monkeypatch.setattr(export, stage, fail)
    arguments = ["--model", llama_folder, "--tree", tree, "-o", tmp_path / "a" / "b" / "out", "--untrained-heads", "2"]
    with unchanged(tmp_path), pytest.raises(ZeroDivisionError):
        main([str(argument) for argument in arguments])


def test_folder_behind_a_path_through_a_missing_one_is_kept(
    llama_folder: Path, tmp_path: Path, commands: Commands
) -> None:
    """`new/../mine` is `mine` once `new` is made, and was not there when its name was looked up."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    tree = write_tree(tmp_path / "tree.json")
    arguments = (
        "--model",
        llama_folder,
        "--untrained-heads",
        "2",
        "--tree",
        tree,
        "-o",
        tmp_path / "new" / ".." / "mine",
    )
    with unchanged(tmp_path):
        commands.export_refuses(*arguments, named=[mine, "not a bundle"])


def test_manifest_of_another_program_makes_no_bundle(llama_folder: Path, tmp_path: Path, commands: Commands) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "manifest.json").write_text('{"name": "a web page"}')
    tree = write_tree(tmp_path / "tree.json")
    arguments = ("--model", llama_folder, "--untrained-heads", "2", "--tree", tree, "-o", page, "--force")
    with unchanged(tmp_path):
        commands.export_refuses(*arguments, named=[page, "not a bundle"])


def test_what_comes_to_the_output_during_an_export_is_kept(tmp_path: Path) -> None:
    from medusa_engine.exporter import bundle

    output = tmp_path / "bundle"

    def export() -> None:
        with bundle.new_bundle(output, force=False) as folder:
            (folder / "new").touch()
            output.mkdir()
            (output / "thesis.txt").write_text("precious")

    with pytest.raises(UserError, match="not a bundle"):
        export()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (output / "thesis.txt").read_text() == "precious"
