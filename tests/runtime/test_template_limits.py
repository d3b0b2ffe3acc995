"""A chat template that would run for ever or fill the memory is ended; what real ones do is not in the way."""

from __future__ import annotations

import resource

import pytest

from medusa_engine.runtime import template_limits
from medusa_engine.runtime.chat_template import ChatTemplate
from medusa_engine.runtime.errors import UserError

MESSAGES = [{"role": "user", "content": "one\ntwo"}]
DOUBLED = "{% set n = namespace(a=messages) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"


def render(source: str) -> str:
    template = ChatTemplate(source, origin="chat_template.jinja", special_tokens={})
    return template.render(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_does_not_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_STEPS", 20_000)
    with pytest.raises(UserError, match=r"chat_template\.jinja.*(SecurityError|RecursionError)"):
        render(source)


def test_a_template_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.01)
    with pytest.raises(UserError, match="takes too long"):
        render("{% for a in range(99999) %}{{ messages[0].content | upper }}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 10 ** (10 ** 8) }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
        "{{ (['x' * 1000000] * 100000) | join }}",
        "{{ ''.join(['x' * 1000000] * 100000) }}",
        "{{ ('\n' * 100000) | indent(9000) }}",
        "{{ 'x' | batch(10 ** 9, 'y') | list }}",
        "{{ lipsum(n=10 ** 6) }}",
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        DOUBLED + "{{ n.a }}",
        DOUBLED + "{{ n.a | tojson }}",
        DOUBLED + "{{ n.a | string }}",
        DOUBLED + "{{ n.a ~ '' }}",
        DOUBLED + "{{ '%s' % (n.a,) }}",
    ],
)
def test_a_template_that_makes_too_much(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="SecurityError: the template"):
        render(source)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 500 << 10


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ messages[0].role ~ none }}", "a1userNone"),
        ("{% for x in [1, 2] if x ~ '' == '2' %}{{ loop.index ~ '/' ~ x }}{% else %}none{% endfor %}", "1/2"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{{ messages[0].content | indent(2) }}|{{ 'abc'.replace('b', '') }}", "one\n  two|ac"),
        ("{{ '%05d' % 7 }} {{ '{:>4}'.format('x') }} {{ 7 // 2 }} {{ 2 ** 10 }}", "00007    x 3 1024"),
        ("{{ range(20000) | list | length }}", "20000"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "one\\ntwo"}]'),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
        ("{% for m in messages recursive %}{{ loop([]) ~ m.role }}{% endfor %}", "user"),
    ],
)
def test_what_real_templates_do_is_done(source: str, text: str) -> None:
    assert render(source) == text


def test_each_rendering_is_counted_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_STEPS", 200)
    template = ChatTemplate("{% for i in range(60) %}.{% endfor %}", origin="t", special_tokens={})
    for _ in range(5):
        assert template.render(MESSAGES, add_generation_prompt=True) == "." * 60
