"""Render chat messages with a checkpoint's own template, which is untrusted code: it runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.template_limits import MOST_MADE, LimitedEnvironment
from medusa_engine.runtime.utf8_file import read_utf8_file

TEMPLATE_FILE = "chat_template.jinja"
_MOST_FORMAT = 1000


class ChatTemplate:
    """A Jinja chat template with the filters, globals and whitespace rules that checkpoints expect.

    Args:
        source: the template's text. It is compiled at the first use.
        origin: the file it comes from, named in every error.
        special_tokens: template variables such as `bos_token`.
    """

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._origin = origin
        self._special_tokens = dict(special_tokens)

    @classmethod
    def find(
        cls,
        folder: Path,
        config: Mapping[str, object],
        *,
        config_file: Path,
        special_tokens: Mapping[str, str],
    ) -> ChatTemplate | None:
        """Return the template of a checkpoint folder, None when it has none.

        `chat_template.jinja` wins over `chat_template` in the tokenizer config, which is a text or a list
        of named templates of which `default` is taken.

        Raises:
            UserError: the template file cannot be read, or the config's value is no template.
        """
        path = folder / TEMPLATE_FILE
        if path.exists():
            source = read_utf8_file(path, hint="save the template as UTF-8")
            return cls(source, origin=str(path), special_tokens=special_tokens)
        value = config.get("chat_template")
        if value is None:
            return None
        if isinstance(value, list):
            named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
            value = named[0].get("template") if named else None
        if not isinstance(value, str):
            raise UserError(
                f"{config_file}: chat_template holds no template text",
                'give a text, or a list of {"name": ..., "template": ...} with one named "default"',
            )
        return cls(value, origin=f"{config_file} (chat_template)", special_tokens=special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation, `{"role": ..., "content": ...}` in order.

        Args:
            messages: at least one message.
            add_generation_prompt: end with the header of the assistant's next message.

        Raises:
            UserError: there is no message, or one is none; the template refuses the messages, or does not compile
                or run.
        """
        if not messages:
            raise UserError("the chat has no messages", "give at least one message with a role and a content")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise UserError(
                    f"message {index} of the chat is {shown(message)}", 'give {"role": ..., "content": ...}, both texts'
                )
        try:
            self._environment.start()
            template = self._template
            pieces = template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return _joined(pieces)
        except _RefusedMessagesError as error:
            raise UserError(
                f"the chat template refuses the messages: {_one_line(error)}",
                "change the messages to roles and an order that the template accepts",
                file=self._origin,
            ) from error
        except TemplateSyntaxError as error:
            raise UserError(
                f"line {error.lineno}: chat template does not compile: {_one_line(error)}",
                "correct the template, or pass a plain prompt",
                file=self._origin,
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(
                f"the chat template fails: {type(error).__name__}: {_one_line(error)}",
                "correct the template or the messages, or pass a plain prompt",
                file=self._origin,
            ) from error
        finally:
            self._environment.finish()

    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self._source)

    @cached_property
    def _environment(self) -> LimitedEnvironment:
        return _environment()


class _RefusedMessagesError(TemplateError):
    """Raised by a template's own `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered in place."""

    tags = {"generation"}  # noqa: RUF012 declared as an instance variable by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PublicNamespace(Namespace):
    """`namespace()` without underscore names, which Python itself would look up on the object."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces may hold namespaces, without end

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespace attribute {shown(name)} begins with an underscore")
        super().__setitem__(name, value)


def _joined(pieces: Iterator[str]) -> str:
    """The text that a template writes piece by piece."""
    text: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_MADE:
            raise SecurityError("the template writes too much text")
        text.append(piece)
    return "".join(text)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.limit_filters()
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and non-ASCII characters, which a model's prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _RefusedMessagesError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MOST_FORMAT:  # what Python makes of it may be 256 times as long
        raise SecurityError("the template gives strftime_now a format that is too long")
    return datetime.now().strftime(format)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
