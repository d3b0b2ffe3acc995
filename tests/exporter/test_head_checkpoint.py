"""Every layout of head checkpoints is told by its tensors, read strictly, and converted without a bit lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_engine.exporter.head_checkpoint import load_heads, read_checkpoint
from medusa_engine.exporter.heads_cli import FORMAT_NAMES, main
from medusa_engine.runtime.errors import UserError

HEADS, LAYERS, HIDDEN, VOCAB = 3, 2, 4, 7

# Names as the projects that write these files give them: one residual weight, one bias, one projection.
NAMES = {
    "original": ("{h}.{l}.linear.weight", "{h}.{l}.linear.bias", "{h}.2.weight"),
    "medusa-2": ("medusa_head.{h}.{l}.linear.weight", "medusa_head.{h}.{l}.linear.bias", "medusa_head.{h}.2.weight"),
    "vllm": ("blocks.{h}.layers.{l}.weight", "blocks.{h}.layers.{l}.bias", "lm_heads.{h}.weight"),
    "tensorrt-llm": (
        "medusa_heads.{h}.medusa_layers.{l}.linear.weight",
        "medusa_heads.{h}.medusa_layers.{l}.linear.bias",
        "medusa_heads.{h}.lm_head.weight",
    ),
    "modelopt": (
        "medusa_heads.{h}.{l}.linear.weight",
        "medusa_heads.{h}.{l}.linear.bias",
        "medusa_heads.{h}.2.weight",
    ),
}


def value(kind: str, head: int, layer: int = 0) -> torch.Tensor:
    """A tensor that is another one for every place in the heads."""
    shape = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,), "projection": (VOCAB, HIDDEN)}[kind]
    seed = 100 * head + 10 * layer + ["weight", "bias", "projection"].index(kind)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(
    layout: str, *, prefix: str = "", biases: bool = True, projections: bool = True
) -> dict[str, torch.Tensor]:
    weight, bias, projection = NAMES[layout]
    tensors = {}
    for h in range(HEADS):
        for layer in range(LAYERS):
            tensors[prefix + weight.format(h=h, l=layer)] = value("weight", h, layer)
            if biases:
                tensors[prefix + bias.format(h=h, l=layer)] = value("bias", h, layer)
        if projections:
            tensors[prefix + projection.format(h=h)] = value("projection", h)
    return tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "medusa_lm_head.safetensors"


@pytest.mark.parametrize("layout", NAMES)
def test_every_tensor_of_a_layout_is_read_into_its_place(layout: str, file: Path) -> None:
    save_file(tensors_of(layout), file)
    checkpoint = read_checkpoint(file)
    assert checkpoint.format.name == layout
    for h in range(HEADS):
        for layer in range(LAYERS):
            assert torch.equal(checkpoint.weights.residual_weight[h, layer], value("weight", h, layer))
            assert torch.equal(checkpoint.weights.residual_bias[h, layer], value("bias", h, layer))
        assert checkpoint.weights.projection is not None
        assert torch.equal(checkpoint.weights.projection[h], value("projection", h))


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_missing_tensor_is_named(layout: str, part: int, file: Path) -> None:
    missing = NAMES[layout][part].format(h=1, l=1)
    tensors = tensors_of(layout)
    del tensors[missing]
    save_file(tensors, file)
    with pytest.raises(UserError) as error:
        read_checkpoint(file)
    assert missing in error.value.problem


@pytest.mark.parametrize("layout", sorted(set(NAMES) - {"medusa-2"}))
def test_unknown_tensor_is_named(layout: str, file: Path) -> None:
    save_file({**tensors_of(layout), "stray.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"stray\.weight"):
        read_checkpoint(file)


@pytest.mark.parametrize("layout", NAMES)
def test_misshapen_tensor_is_named(layout: str, file: Path) -> None:
    name = NAMES[layout][0].format(h=2, l=0)
    save_file({**tensors_of(layout), name: torch.zeros(HIDDEN, HIDDEN + 1)}, file)
    with pytest.raises(UserError) as error:
        read_checkpoint(file)
    assert name in error.value.problem


def test_whole_model_gives_its_heads_and_none_of_its_own_weights(file: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), **tensors_of("medusa-2")}, file)
    assert read_checkpoint(file).weights.heads == HEADS


def test_shards_of_a_whole_model_are_read_together(tmp_path: Path) -> None:
    tensors = tensors_of("medusa-2")
    shards = {"model-00001-of-00002.safetensors": dict(list(tensors.items())[::2])}
    shards["model-00002-of-00002.safetensors"] = dict(list(tensors.items())[1::2])
    for name, part in shards.items():
        save_file(part, tmp_path / name)
    weight_map = {tensor: name for name, part in shards.items() for tensor in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_checkpoint(tmp_path)
    assert torch.equal(checkpoint.weights.residual_weight[2, 1], value("weight", 2, 1))


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_prefix_of_a_distributed_run_is_taken_off(prefix: str, file: Path) -> None:
    save_file(tensors_of("original", prefix=prefix), file)
    assert read_checkpoint(file).format.name == "original"


def test_tensors_count_and_not_what_the_config_claims(file: Path) -> None:
    save_file(tensors_of("original"), file)
    (file.parent / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": "a/b"}))
    checkpoint = read_checkpoint(file.parent)
    assert checkpoint.weights.heads == HEADS
    assert checkpoint.base == "a/b"
    assert checkpoint.notes == ("config.json says medusa_num_heads 2, the file holds 3",)


def test_heads_without_biases_have_zeros_and_it_is_said(file: Path) -> None:
    save_file(tensors_of("original", biases=False), file)
    checkpoint = read_checkpoint(file)
    assert not checkpoint.weights.residual_bias.any()
    assert any("no biases" in note for note in checkpoint.notes)


def test_heads_without_projections_share_the_base_models_and_it_is_said(file: Path) -> None:
    save_file(tensors_of("original", projections=False), file)
    checkpoint = read_checkpoint(file)
    assert checkpoint.weights.projection is None
    assert any("share" in note for note in checkpoint.notes)


def test_one_projection_for_all_heads_is_read_once(file: Path) -> None:
    common = value("projection", 9)
    save_file({**tensors_of("vllm", projections=False, prefix="medusa_heads."), "lm_head.weight": common}, file)
    projection = read_checkpoint(file).weights.projection
    assert projection is not None
    assert torch.equal(projection, common[None])


def test_backbone_in_a_tensorrt_llm_checkpoint_is_not_needed_and_it_is_said(tmp_path: Path) -> None:
    """convert_checkpoint.py of TensorRT-LLM saves both in one file, the backbone under names of its own."""
    backbone = {"transformer.vocab_embedding.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(1)}
    save_file({**tensors_of("tensorrt-llm"), **backbone}, tmp_path / "rank0.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format.name, checkpoint.weights.heads) == ("tensorrt-llm", HEADS)
    assert any(note.startswith("not needed: 2 tensors") for note in checkpoint.notes)


def test_scales_of_modelopt_are_not_needed_and_it_is_said(file: Path) -> None:
    scale = {"medusa_heads.0.0.linear.input_scale": torch.ones(1)}
    save_file({**tensors_of("modelopt"), **scale}, file)
    assert any("input_scale" in note for note in read_checkpoint(file).notes)


def test_scales_of_quantised_weights_are_refused(file: Path) -> None:
    scale = {"medusa_heads.0.0.linear.weight_scale": torch.ones(1)}
    save_file({**tensors_of("modelopt"), **scale}, file)
    with pytest.raises(UserError, match="weight_scale"):
        read_checkpoint(file)


@pytest.mark.parametrize(
    ("token_map", "named"),
    [([0, 2, 2, 3, 4, 5, 6], "twice"), ([0, -1, 2, 3, 4, 5, 6], "token ids"), ([0, 1], "2 tokens")],
)
def test_draft_vocabulary_that_does_not_fit_is_refused(token_map: list[int], named: str, file: Path) -> None:
    save_file({**tensors_of("vllm"), "token_map": torch.tensor(token_map)}, file)
    with pytest.raises(UserError, match=named):
        read_checkpoint(file)


def test_draft_vocabulary_past_the_base_models_is_refused(file: Path) -> None:
    save_file({**tensors_of("vllm"), "token_map": torch.tensor([0, 2, 4, 6, 8, 10, 12])}, file)
    assert load_heads(file, hidden=HIDDEN, vocab_size=13).heads == HEADS
    with pytest.raises(UserError, match="vocabulary of 12"):
        load_heads(file, hidden=HIDDEN, vocab_size=12)


def test_layouts_offered_are_those_that_are_read() -> None:
    assert set(FORMAT_NAMES) == set(NAMES)


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_conversion_writes_the_names_of_the_target_and_the_same_bytes(source: str, target: str, tmp_path: Path) -> None:
    save_file(tensors_of(source), tmp_path / "in.safetensors")
    arguments = ["convert", tmp_path / "in.safetensors", "--to", target, "-o", tmp_path / "out.safetensors"]
    assert main(list(map(str, arguments))) == 0
    written = load_file(tmp_path / "out.safetensors")
    expected = tensors_of(target)
    assert set(written) == set(expected)
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert (
        read_checkpoint(tmp_path / "in.safetensors").checksum == read_checkpoint(tmp_path / "out.safetensors").checksum
    )


def test_conversion_keeps_the_dtype(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of("original").items()}
    save_file(tensors, tmp_path / "in.safetensors")
    arguments = ["convert", tmp_path / "in.safetensors", "--to", "vllm", "-o", tmp_path / "out.safetensors"]
    assert main(list(map(str, arguments))) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "out.safetensors").values()} == {torch.bfloat16}


def test_conversion_to_a_layout_without_a_draft_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({**tensors_of("vllm"), "token_map": torch.arange(VOCAB)}, tmp_path / "in.safetensors")
    arguments = ["convert", tmp_path / "in.safetensors", "--to", "original", "-o", tmp_path / "out.safetensors"]
    assert main(list(map(str, arguments))) == 1
    assert "token_map" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_conversion_does_not_replace_a_file_unasked(tmp_path: Path) -> None:
    save_file(tensors_of("vllm"), tmp_path / "in.safetensors")
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"kept")
    arguments = ["convert", tmp_path / "in.safetensors", "--to", "original", "-o", output]
    assert main(list(map(str, arguments))) == 1
    assert output.read_bytes() == b"kept"
    assert main([*map(str, arguments), "--force"]) == 0


def test_inspection_says_what_the_file_holds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(tensors_of("tensorrt-llm"), file)
    assert main(["inspect", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = {
        "format": "tensorrt-llm",
        "heads": HEADS,
        "residual layers": LAYERS,
        "hidden": HIDDEN,
        "vocabulary": VOCAB,
    }
    assert expected.items() <= facts.items()
    assert (facts["projection"], facts["dtype"], facts["biases"]) == ("own", "float32", "yes")
