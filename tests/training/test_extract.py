"""Features of given examples are transformers' own hidden states, whatever they were batched and padded with."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_llama
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from medusa_engine.exporter.checkpoint import find_source, load_model
from medusa_engine.runtime.errors import UserError
from medusa_engine.training import extract
from medusa_engine.training.chat_data import read_chat_data
from medusa_engine.training.example import Example
from medusa_engine.training.extract import extract_features
from medusa_engine.training.features import Features, load_features, shard_paths
from medusa_engine.training.labels import IGNORED, head_labels, head_weights
from medusa_engine.training.medusa1 import HeadTrainer
from medusa_engine.training.medusa1_settings import TrainSettings
from medusa_engine.training.shards import read_shard
from medusa_engine.training.training_log import TrainingLog
from medusa_engine.training.vocabulary import Vocabulary

CASES = Path(__file__).parents[1] / "data" / "training"
VOCAB = 128
HEADS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_model(find_source(str(checkpoint)))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


def random_examples(count: int, *, longest: int = 40, seed: int = 0) -> list[Example]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, count)
    return [Example(generator.integers(0, VOCAB, n), generator.random(n) < 0.7) for n in lengths]


def store(model: Any, examples: Sequence[Example], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The shards that extraction writes; the model stays as it is."""
    extract_features(
        copy.deepcopy(model), examples, folder, **{"provenance": {"from": "test"}, "report": print, **options}
    )
    return [read_shard(path) for path in shard_paths(folder)]


def check_equal(stored: Sequence[dict[str, Any]], examples: Sequence[Example], reference: Any) -> None:
    """Every conversation is there once, in order, with what transformers says of it alone."""
    number = 0
    for shard in stored:
        ends = np.cumsum(shard["lengths"])
        for start, end in zip(ends - shard["lengths"], ends, strict=True):
            tokens, owned = examples[number]
            assert shard["numbers"][int(np.flatnonzero(ends == end)[0])] == number
            assert shard["tokens"][start:end].tolist() == tokens.tolist()
            assert shard["owned"][start:end].tolist() == owned.tolist()
            with torch.no_grad():
                out = reference.model(torch.from_numpy(tokens)[None]).last_hidden_state
                logprobs = torch.log_softmax(reference(torch.from_numpy(tokens)[None]).logits[0], dim=-1)
            top = logprobs.topk(8, dim=-1)
            assert shard["hidden"][start:end].astype(np.float32) == pytest.approx(out[0].numpy(), abs=2e-3, rel=1e-3)
            found = shard["top_logprobs"][start:end].astype(np.float32)
            assert found == pytest.approx(top.values.numpy(), abs=5e-3)
            named = logprobs.gather(1, torch.from_numpy(shard["top_ids"][start:end].astype(np.int64)))
            assert found == pytest.approx(named.numpy(), abs=5e-3)
            number += 1
    assert number == len(examples)


@pytest.mark.parametrize("batch", [1, 16])
def test_hidden_states_and_distributions_are_those_of_transformers(
    model: Any, reference: Any, tmp_path: Path, batch: int
) -> None:
    examples = random_examples(70)
    stored = store(model, examples, tmp_path / "data", batch=batch)
    assert [len(shard["numbers"]) for shard in stored] == [64, 6]
    assert [(shard["hidden"].dtype, shard["top_ids"].dtype) for shard in stored] == [("float16", "int32")] * 2
    check_equal(stored, examples, reference)


def test_a_pass_has_at_most_the_batch_and_few_logits_and_that_changes_nothing(
    model: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = random_examples(40)
    shapes: list[tuple[int, int]] = []
    watched = copy.deepcopy(model)
    watched.model.embed_tokens.register_forward_pre_hook(lambda _module, ids: shapes.append(tuple(ids[0].shape)))
    check_equal(store(watched, examples, tmp_path / "data", batch=7), examples, reference)
    assert max(rows for rows, _ in shapes) == 7 and sum(rows for rows, _ in shapes) == 40

    shapes.clear()
    monkeypatch.setattr(extract, "_LOGITS_PER_PASS", 30 * VOCAB)  # less than the longest example has
    check_equal(store(watched, examples, tmp_path / "small", batch=7), examples, reference)
    assert all(rows == 1 or rows * length <= 30 for rows, length in shapes)
    assert any(rows > 1 for rows, _ in shapes) and any(length > 30 for _, length in shapes)


def test_the_padding_may_be_a_token_of_the_examples(model: Any, reference: Any, tmp_path: Path) -> None:
    examples = [row for row in read_chat_data(CASES / "pad_is_eos.jsonl").rows if isinstance(row, Example)]
    examples += [Example(np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.bool_)) for count in (1, 3, 17)]
    stored = store(model, examples, tmp_path / "data")
    check_equal(stored, examples, reference)
    assert stored[0]["lengths"].tolist() == [5, 5, 5, 5, 10, 1, 3, 17]
    labels = head_labels(stored[0]["tokens"], stored[0]["owned"], stored[0]["lengths"], 1)
    assert (labels == 2).sum() == 5, "the stop token of every row is a label"


def test_capped_attention_and_windows_are_kept(tmp_path: Path) -> None:
    """Gemma 2 caps its attention scores, which torch's fused attention does not, and caps its logits."""
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, attn_logit_softcapping=0.5, final_logit_softcapping=2.0,
        query_pre_attn_scalar=1, initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gemma", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    examples = random_examples(12)
    stored = store(load_model(find_source(str(tmp_path / "gemma"))), examples, tmp_path / "data")
    check_equal(stored, examples, reference)


def test_heads_read_the_label_at_their_own_offset(model: Any, tmp_path: Path) -> None:
    examples = [row for row in read_chat_data(CASES / "cycle7.jsonl").rows if isinstance(row, Example)]
    store(model, examples, tmp_path / "data")
    features = load_features(shard_paths(tmp_path / "data"), HEADS).training
    (shard,) = [read_shard(path) for path in shard_paths(tmp_path / "data")]
    places = np.concatenate([np.arange(48)] * 31)  # conversation 0 is held out
    first = np.concatenate([row.tokens[:1].repeat(48) for row in examples[1:]])
    with_label = places < 46
    current = 3 + (first - 3 + places)[with_label] % 7  # the cycle is 3 ... 9
    for head in range(HEADS):
        known = features.labels[:, head] != IGNORED
        assert (features.labels[known, head] == 3 + (current[known] - 3 + head + 2) % 7).all()
        assert known.sum() == 31 * (46 - head)
    assert len(features) == with_label.sum() and len(shard["tokens"]) == 32 * 48


def losses_and_gradients(features: Features, model: Any, folder: Path) -> tuple[float, list[torch.Tensor]]:
    trainer = HeadTrainer(
        TrainSettings(heads=HEADS, soft=0.0),
        Vocabulary(model.get_output_embeddings().weight.detach(), None),
        folder,
        TrainingLog(folder, HEADS, report=print),
    )
    scores = trainer._train_batch(features, np.arange(len(features)), 10, measured=False)
    return float(scores.loss @ head_weights(HEADS)), [
        parameter.grad for parameter in trainer.heads.parameters() if parameter.grad is not None
    ]


def test_a_row_of_masked_labels_adds_nothing_to_loss_and_gradient(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    labels = [json.loads(line) for line in (CASES / "all_masked_row.jsonl").read_text().splitlines()]
    masked, other = (Example(np.array(row["input_ids"]), np.array(row["labels"]) != IGNORED) for row in labels)
    found = {}
    for name, examples in {"alone": [other, other], "both": [other, other, masked]}.items():
        store(model, examples, tmp_path / name)
        features = load_features(shard_paths(tmp_path / name), HEADS).training
        found[name] = losses_and_gradients(features, AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path)
    assert np.isfinite(found["both"][0])
    assert found["both"][0] == found["alone"][0] > 0
    assert found["both"][1] and any(gradient.any() for gradient in found["both"][1])
    for with_masked, alone in zip(found["both"][1], found["alone"][1], strict=True):
        assert torch.equal(with_masked, alone)

    store(model, [other, masked], tmp_path / "masked")
    with pytest.raises(UserError, match="no training positions"):
        load_features(shard_paths(tmp_path / "masked"), HEADS)


def test_an_interrupted_run_goes_on_and_ends_the_same(model: Any, tmp_path: Path) -> None:
    examples = random_examples(150)

    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store(model, examples, tmp_path / "data", report=interrupt)
    kept = shard_paths(tmp_path / "data")
    assert len(kept) == 1
    (tmp_path / "data" / "shard-00001.partial").write_bytes(b"half of a shard")
    stamp = kept[0].stat().st_mtime_ns
    store(model, examples, tmp_path / "data")
    assert kept[0].stat().st_mtime_ns == stamp, "what is there is not written again"
    store(model, examples, tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == ["data.json", *(f"shard-0000{index}.npz" for index in range(3))]
    for name in names:
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    manifest = json.loads((tmp_path / "data" / "data.json").read_text())
    assert (manifest["shards"], manifest["conversations"]) == (3, 150)
    assert manifest["tokens"] == sum(len(example.tokens) for example in examples)
    assert manifest["owned_tokens"] == sum(int(example.owned.sum()) for example in examples)


def test_a_lost_shard_is_written_again_and_a_damaged_one_named(model: Any, tmp_path: Path) -> None:
    examples = random_examples(150)
    store(model, examples, tmp_path / "data")
    before = [path.read_bytes() for path in shard_paths(tmp_path / "data")]
    (tmp_path / "data" / "shard-00001.npz").unlink()
    store(model, examples, tmp_path / "data")
    assert [path.read_bytes() for path in shard_paths(tmp_path / "data")] == before
    for damaged in (before[1][:100], before[1][:-100], b"", b"text"):
        (tmp_path / "data" / "shard-00001.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"shard-00001\.npz: damaged"):
            store(model, examples, tmp_path / "data")


def test_data_made_from_something_else_is_not_mixed_in(model: Any, tmp_path: Path) -> None:
    examples = random_examples(5)
    store(model, examples, tmp_path / "data")
    tokens, owned = examples[0]
    others: list[dict[str, Any]] = [
        {"provenance": {"from": "another model"}},
        {"dtype": "bfloat16"},
        {"examples": [Example(tokens + 1, owned), *examples[1:]]},
        {"examples": [Example(tokens, ~owned), *examples[1:]]},
        {"examples": examples[:4]},
    ]
    for other in others:
        with pytest.raises(UserError, match="other settings"):
            store(model, other.pop("examples", examples), tmp_path / "data", **other)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files"):
        store(model, examples, tmp_path / "data")


def test_states_beyond_float16_are_refused(model: Any, tmp_path: Path) -> None:
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.model.norm.weight.mul_(1e6)
    with pytest.raises(UserError, match="not finite in float16"):
        store(loud, random_examples(3), tmp_path / "data")
