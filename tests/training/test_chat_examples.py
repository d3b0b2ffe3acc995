"""Owned are exactly the tokens the assistant writes in use; the tokens are those that medusa-distill writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TOKENIZERS

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.training.chat_data import ChatData, Skip, read_chat_data
from medusa_engine.training.chat_examples import ChatEncoder, make_examples
from medusa_engine.training.conversation import Conversation, SamplingPolicy, TemplateSegments
from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED, head_labels

EOS = 2  # "</s>" of the byte-level tokenizers
STOPS = frozenset({EOS})
CASES = Path(__file__).parents[1] / "data" / "training"

# Header, content, stop token, newline, as ChatML has them.
LINES = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# A default system prompt, trimmed contents, no newline between the turns.
TRIMMED = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<system>Be kind.</s>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The model writes its thoughts, and only the last answer keeps them.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(thinks){% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The header of the next answer is not that of an answer that is there.
OTHER_HEADER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant> now:{% endif %}"
)
GLUED = (  # "<assistant> " and the answer's first letter may be one token
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tokenizer_with(folder: Path, template: str) -> Tokenizer:
    shutil.copytree(TOKENIZERS / "bytelevel_no_template", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.open(folder)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def encoded(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Example:
    example = ChatEncoder(tokenizer, STOPS).encode(messages)
    assert isinstance(example, Example)
    return example


def owned_texts(tokenizer: Tokenizer, example: Example) -> list[str]:
    """The text of every run of owned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.owned.astype(np.int64), [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(example.tokens[start:end].tolist(), skip_special_tokens=False) for start, end in pairs]


@pytest.mark.parametrize("template", [LINES, TRIMMED], ids=["lines", "trimmed"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_each_answer_and_its_stop_token_are_owned_and_nothing_else(
    tmp_path: Path, template: str, system: str | None
) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    messages = chat("hello w", "hell o", "'s it?", "he", "last", "hello", system=system)
    example = encoded(tokenizer, messages)
    assert (example.tokens.dtype, example.owned.dtype) == ("int64", "bool")
    assert owned_texts(tokenizer, example) == ["hell o</s>", "he</s>", "hello</s>"]
    assert example.tokens[-1] == EOS and example.owned[-1], "what the template has behind the end is left out"
    whole = tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=False), add_special_tokens=False)
    assert example.tokens.tolist() == whole[: len(example.tokens)]


@pytest.mark.parametrize("template", [LINES, TRIMMED], ids=["lines", "trimmed"])
def test_the_tokens_before_an_answer_are_those_of_the_prompt_in_use(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    messages = chat("hello", "one", "two", "three")
    example = encoded(tokenizer, messages)
    starts = np.flatnonzero(np.diff(example.owned.astype(np.int64)) == 1) + 1
    for start, place in zip(starts, (1, 3), strict=True):
        assert example.tokens[:start].tolist() == tokenizer.encode_chat(messages[:place])


def test_labels_of_every_head_are_owned_tokens_at_its_offset(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, LINES)
    tokens, owned = encoded(tokenizer, chat("q", "ab", "q", "c"))
    labels = head_labels(tokens, owned, np.array([len(tokens)]), 3)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    for head in range(3):
        kept = labels[:, head] != IGNORED
        assert labels[kept, head].tolist() == [a, b, EOS, c, EOS]
        assert np.flatnonzero(kept).tolist() == (np.flatnonzero(owned) - head - 2).tolist()


@pytest.mark.parametrize("template", [LINES, TRIMMED], ids=["lines", "trimmed"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_given_conversation_is_what_distillation_writes_of_it(tmp_path: Path, template: str, turns: int) -> None:
    """The state machine of medusa-distill is fed a model that writes these very texts."""
    tokenizer = tokenizer_with(tmp_path, template)
    texts = ["hello w", "hell o 's", "he", ": hello"][: 2 * turns]
    policy = SamplingPolicy(turns=turns, user_temperature=0.0, assistant_temperatures=(0.0,))
    seed = next(seed for seed in range(99) if np.random.default_rng([seed, 0]).integers(1, turns + 1) == turns)
    first, *others = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    written = Conversation(
        0,
        TemplateSegments(tokenizer, policy.turns),
        policy,
        seed=seed,
        prompt=first,
        max_length=500,
        stop_ids=STOPS,
    )
    script = [token for part in others for token in (*part, EOS)]
    nothing = np.zeros(1, dtype=np.float32)
    while not written.done:
        forced = bool(written._forced)
        written.advance(np.array([0 if forced else script.pop(0)]), nothing, nothing)
    assert not script

    given = encoded(tokenizer, chat(*texts))
    assert given.tokens.tolist() == written.tokens
    assert given.owned.tolist() == written.owned


def skip_of(tokenizer: Tokenizer, messages: list[dict[str, str]], stops: frozenset[int] = STOPS) -> Skip:
    found = ChatEncoder(tokenizer, stops).encode(messages)
    assert isinstance(found, Skip)
    return found


def test_a_template_that_rewrites_earlier_turns_is_used_for_single_ones_only(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, FORGETFUL)
    assert owned_texts(tokenizer, encoded(tokenizer, chat("q", "a"))) == ["(thinks)a</s>"]
    assert skip_of(tokenizer, chat("q", "a", "q", "b")) is Skip.REWRITTEN


def test_an_answer_that_does_not_begin_as_the_prompt_ends_is_skipped(tmp_path: Path) -> None:
    assert skip_of(tokenizer_with(tmp_path, OTHER_HEADER), chat("q", "a")) is Skip.REWRITTEN


def test_an_answer_whose_first_token_reaches_into_the_header_is_skipped(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, GLUED)
    assert skip_of(tokenizer, chat("q", "w")) is Skip.REWRITTEN, "' w' is one token of this tokenizer"
    assert owned_texts(tokenizer, encoded(tokenizer, chat("q", "?"))) == ["?</s>"]


@pytest.mark.parametrize("text", ["a</s>b", "a<|eot|>", "<s>struck</s>"])
def test_an_answer_with_the_text_of_a_control_token_is_skipped_a_question_is_not(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_with(tmp_path, LINES)
    assert skip_of(tokenizer, chat("q", text)) is Skip.CONTROL_TOKEN
    example = encoded(tokenizer, chat(text, "b"))
    assert owned_texts(tokenizer, example) == ["b</s>"]


def test_an_answer_with_an_ordinary_stop_token_inside_is_skipped(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, LINES)
    (letter,) = tokenizer.encode("x")
    assert skip_of(tokenizer, chat("q", "axb"), STOPS | {letter}) is Skip.CONTROL_TOKEN


@pytest.mark.parametrize("contents", [["q", "a"], ["q", "a", "</s>", "b"]])
def test_an_answer_that_nothing_stops_is_skipped(tmp_path: Path, contents: list[str]) -> None:
    """The stop token of a later question does not end the answer before it."""
    tokenizer = tokenizer_with(tmp_path, ENDLESS + "{% if add_generation_prompt %}assistant: {% endif %}")
    assert skip_of(tokenizer, chat(*contents)) is Skip.NO_STOP
    plain = tokenizer_with(tmp_path, ENDLESS)
    assert skip_of(plain, chat(*contents)) is Skip.NO_STOP


def test_messages_that_the_template_refuses_are_skipped() -> None:
    tokenizer = Tokenizer.open(TOKENIZERS / "bytelevel_template_file_only")
    assert skip_of(tokenizer, chat("q", "a", system="s"), frozenset({3})) is Skip.REFUSED


def test_a_template_that_does_not_work_is_an_error_and_no_reason_to_skip(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not compile"):
        ChatEncoder(tokenizer_with(tmp_path, "{% for %}"), STOPS)


def examples_of(
    data: ChatData, tokenizer: Tokenizer | None, *, max_length: int = 100, vocab_size: int = 272
) -> list[Example]:
    return make_examples(
        data, Path("rows"), tokenizer=tokenizer, stop_ids=STOPS, vocab_size=vocab_size, max_length=max_length
    )


def test_every_cut_keeps_the_labels_of_what_is_left_and_drops_rows_without_any(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, LINES)
    messages = chat("q", "ab", "q", "c")
    whole = encoded(tokenizer, messages)
    first = int(np.flatnonzero(whole.owned)[0])
    for length in range(first + 1, len(whole.tokens) + 2):
        data = ChatData([messages])
        (cut,) = examples_of(data, tokenizer, max_length=length)
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert cut.owned.tolist() == whole.owned[:length].tolist()
    data = ChatData([messages, Example(np.array([5]), np.array([True]))])
    data.report.used = 2
    assert len(examples_of(data, tokenizer, max_length=first)) == 1
    assert (data.report.used, data.report.skipped) == (1, {Skip.BEYOND_LENGTH: 1})


def test_the_report_follows_what_the_template_says(tmp_path: Path) -> None:
    data = read_chat_data(CASES / "sharegpt_odd.json")
    (example,) = examples_of(data, tokenizer_with(tmp_path, LINES))
    assert data.report.used == 1 and data.report.skipped.total() == 4
    assert example.owned.sum() == 2  # "2" and its stop token
    data = read_chat_data(CASES / "sharegpt_odd.json")
    with pytest.raises(UserError, match=r"no row can be used: .*1 skipped: refused by the chat template"):
        examples_of(data, Tokenizer.open(TOKENIZERS / "bytelevel_template_file_only"))


def test_messages_need_a_chat_template_and_tokens_do_not() -> None:
    plain = Tokenizer.open(TOKENIZERS / "bytelevel_no_template")
    for tokenizer in (None, plain):
        with pytest.raises(UserError, match="no chat template"):
            examples_of(read_chat_data(CASES / "sharegpt_odd.json"), tokenizer)
        assert len(examples_of(read_chat_data(CASES / "cycle7.jsonl"), tokenizer)) == 32


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    rows = read_chat_data(CASES / "all_masked_row.jsonl")
    with pytest.raises(UserError, match="token 8, outside the model's vocabulary of 8"):
        examples_of(rows, None, vocab_size=8)
    with pytest.raises(UserError, match="outside the model's vocabulary of 60"):
        examples_of(ChatData([chat("q", "a")]), tokenizer_with(tmp_path, LINES), vocab_size=60)
