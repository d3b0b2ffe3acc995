"""Rendered chats, the sandbox around templates, and the errors of templates that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from medusa_engine.runtime.chat_template import ChatTemplate
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer

FOLDERS = Path(__file__).parents[1] / "data" / "tokenizers"
# The expected ids and texts were computed with transformers 5.24.
EXPECTED: dict[str, Any] = json.loads((FOLDERS / "EXPECTED.json").read_text(encoding="utf-8"))
MESSAGES = EXPECTED["bytelevel_bos_twice"]["messages"]
CHAT = [
    {"role": "system", "content": "Be <brief> & 'exact'.\n"},
    {"role": "user", "content": "  é 😀 "},
    {"role": "assistant", "content": "{{ not_code }}"},
    {"role": "user", "content": ""},
]

# Each uses something that templates of released checkpoints rely on.
TEMPLATES = {
    "whitespace": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  [{{ m.content }}]\n  {%- endif %}\n{% endfor %}\n"
    ),
    "tojson": "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}",
    "tojson_options": ("{{ {'b': 1, 'a': '<é'} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"),
    "loop_controls": (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(found=false, last='') %}"
        "{% for m in messages %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}{{ ns.found }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
        "{% endgeneration %}{% else %}{{ m.role }}{% endif %}{% endfor %}"
    ),
    "generation_scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "special_tokens": ("{{ bos_token }}{{ eos_token }}{{ pad_token }}[{{ unk_token }}][{{ mask_token is defined }}]"),
    "tools_and_documents": (
        "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ enable_thinking is defined }}"
    ),
    "generation_prompt": "{% if add_generation_prompt %}<assistant>{% endif %}",
    "undefined_is_empty": "[{{ messages[0].name }}]{% if messages[0].name %}x{% endif %}",
    "string_methods": ("{{ messages[0].content.strip().split(' ')[0] | upper }}{{ messages[1]['content'] | trim }}"),
    "macro": ("{% macro show(m) %}<{{ m['role'] }}>{% endmacro %}{% for m in messages[1:] %}{{ show(m) }}{% endfor %}"),
    "dict_and_range": "{{ dict(a=1)['a'] }}{% for i in range(3) %}{{ i }}{% endfor %}",
    "private_attribute": "[{{ ''.__class__ }}]",
}


def write_template(folder: Path, source: str) -> Path:
    shutil.copytree(FOLDERS / "bytelevel_no_template", folder, dirs_exist_ok=True)
    path = folder / "chat_template.jinja"
    path.write_text(source, encoding="utf-8")
    return path


def render(source: str, messages: list[dict[str, str]] = CHAT, *, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, origin="folder/chat_template.jinja", special_tokens={"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def error_of(source: str) -> UserError:
    with pytest.raises(UserError) as caught:
        render(source)
    error = caught.value
    assert error.problem.startswith("folder/chat_template.jinja: ")
    assert "\n" not in error.problem
    assert error.hint
    assert "\n" not in error.hint
    return error


def test_a_rendered_chat_is_encoded_without_a_second_bos() -> None:
    expected = EXPECTED["bytelevel_bos_twice"]
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_bos_twice")
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(MESSAGES) == expected["rendered"]
    assert tokenizer.encode_chat(MESSAGES) == expected["right_ids"]


def test_a_template_beside_the_config_is_found() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_template_file_only")
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat(MESSAGES) == EXPECTED["bytelevel_template_file_only"]["right_ids"]


def test_a_chat_without_a_template_is_a_user_error_that_names_the_folder() -> None:
    folder = FOLDERS / "bytelevel_no_template"
    tokenizer = Tokenizer.open(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert str(folder) in caught.value.problem


def test_a_template_that_refuses_a_role_reaches_the_user_with_its_own_words() -> None:
    tokenizer = Tokenizer.open(FOLDERS / EXPECTED["system_role"]["tokenizer"])
    with pytest.raises(UserError, match="refuses the messages: role system not supported") as caught:
        tokenizer.render_chat(EXPECTED["system_role"]["messages"])
    assert "tokenizer_config.json" in caught.value.problem


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    write_template(tmp_path, TEMPLATES[name])
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert Tokenizer.open(tmp_path).render_chat(CHAT, add_generation_prompt) == reference


def test_the_template_file_wins_over_the_config_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_template(tmp_path, "from the file")
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    named = [{"name": "other", "template": "other"}, {"name": "default", "template": "named default"}]
    for in_config, wanted in (("from the config", "from the config"), (named, "named default")):
        config_path.write_text(json.dumps({**config, "chat_template": in_config}), encoding="utf-8")
        for text in ("from the file", wanted):
            path.write_text("from the file", encoding="utf-8")
            if text == wanted:
                path.unlink()
            reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
            assert reference.apply_chat_template(CHAT, tokenize=False) == text
            assert Tokenizer.open(tmp_path).render_chat(CHAT) == text


@pytest.mark.parametrize(
    "value", [7, [], [{"name": "tool_use", "template": "x"}], [{"name": "default"}], {"default": "x"}]
)
def test_a_config_value_that_holds_no_template_is_a_user_error(tmp_path: Path, value: object) -> None:
    shutil.copytree(FOLDERS / "bytelevel_no_template", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "chat_template": value}), encoding="utf-8")
    with pytest.raises(UserError, match="chat_template holds no template") as caught:
        Tokenizer.open(tmp_path)
    assert str(path) in caught.value.problem


def test_a_template_file_that_is_not_utf8_is_a_user_error_with_the_byte_offset(tmp_path: Path) -> None:
    path = write_template(tmp_path, "")
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match="offset 2") as caught:
        Tokenizer.open(tmp_path)
    assert str(path) in caught.value.problem


def test_a_broken_template_leaves_plain_prompts_usable(tmp_path: Path) -> None:
    path = write_template(tmp_path, "{% if %}")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hello") == [263]
    with pytest.raises(UserError) as caught:
        tokenizer.encode_chat(MESSAGES)
    assert str(path) in caught.value.problem


def test_a_chat_without_messages_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no messages"):
        render("x", [])


def test_the_templates_own_date_is_todays() -> None:
    assert render("{{ strftime_now('%%') }}") == "%"
    assert render("{{ strftime_now('%Y') | length }}") == "4"


def test_a_syntax_error_names_its_line() -> None:
    assert "line 2" in error_of("fine\n{% for %}").problem


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing_function() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 'x' | no_such_filter }}",
        "{% include 'other.jinja' %}",
        "{{ raise_exception('two\nlines') }}",
        "{{ range(10 ** 9) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% generation %}never closed",
    ],
)
def test_a_template_that_fails_is_a_user_error_that_names_its_file(source: str) -> None:
    error_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now['__globals__']['json'] }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{% set ns = namespace() %}{% set ns.__html__ = strftime_now %}",
        "{% set ns = namespace(__html__=strftime_now) %}",
    ],
)
def test_a_template_that_reaches_for_python_is_stopped(source: str) -> None:
    assert "SecurityError" in error_of(source).problem


def test_rendering_changes_no_message_of_the_caller() -> None:
    messages = [dict(message) for message in CHAT]
    render("{{ messages | map(attribute='role') | join(',') }}", messages)
    assert messages == CHAT


@pytest.mark.parametrize(
    "message", ["hi", 5, {"role": "user"}, {"content": "hi"}, {"role": "user", "content": None}], ids=repr
)
def test_what_is_no_message_is_refused_by_its_place(message: Any) -> None:
    with pytest.raises(UserError, match="message 1 of the chat is"):
        render("{{ messages[1].content }}", [{"role": "user", "content": "?"}, message])
