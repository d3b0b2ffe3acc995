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
        "{{ [1] * 10 ** 8 }}",
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


PAIR = "{% set x = [1] %}{% set y = [1] %}" + "{% set x = [x, x] %}{% set y = [y, y] %}" * 40
TUPLES = "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 40
NUMBERS = "{% set x = range(30000) | list %}{% set y = range(30000) | list %}"
MERSENNE = 2**61 - 1  # what Python's hashes of numbers are taken by


@pytest.mark.parametrize(
    "source",
    [
        PAIR + "{{ x == y }}",
        PAIR + "{{ x in [y] }}",
        PAIR + "{{ [x, y] | sort | length }}",
        PAIR + "{{ [x, y] | min | length }}",
        PAIR + "{{ [x, y] | unique | list | length }}",
        TUPLES + "{{ {x: 1} | length }}",
        "{% set x = [1] %}" + "{% set x = {'a': [x, x]}.keys().mapping %}" * 40,
        "{% set x = [1] %}" + "{% set x = {'a': [x, x]}.items() %}" * 40,
        "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
        "{% for b in [1] | batch(10000, 'x' * 8000) %}{% endfor %}",
        "{% set n = namespace(a=(1,)) %}{% for i in range(99999) %}{% set n.a = (n.a,) %}{% endfor %}{{ {n.a: 1} }}",
        "{% set x = 'abcd' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
        "{% set x %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
        "{% set x = 'x' * 4000000 %}{{ [" + "x[1:], " * 5000 + "] | length }}",
        "{{ ('a ' * 20000000) | title }}",
        "{{ ([[1]] * 5000) | sum(start=[]) }}",
        "{{ ('x' * 4000000) | wordwrap(1) }}",
        "{{ ('<!---->' * 500000) | striptags }}",
        "{{ (('<!---->' * 500000) | safe).striptags() }}",
        "{{ ('x' * 4000000).rfind('xy' ~ 'x' * 2000000) }}",
        "{{ ('x' * 2000000) | trim('y' * 2000000 ~ 'x') }}",
        f"{{{{ range(0, 99999 * {MERSENNE}, {MERSENNE}) | unique | list }}}}",
        "{{ '{:{}}'.format('x', '9999999999') }}",
        "{{ ('{0}' * 30000).format('x' * 1000000) }}",
        "{{ ('%(a)s' * 30000) % {'a': 'x' * 1000000} }}",
        "{{ ('%(a)s' * 30000) | format(a='x' * 1000000) }}",
        "{{ ('x' * 1000000) | replace(new='y' * 1000000, old='x') }}",
        "{{ ('x\r' * 1000000) | indent(first=true, width=9000) }}",
        "{{ ('\t' * 1000000).expandtabs(10000) }}",
        "{{ range(9999) | map('string') | join('x' * 1000000) }}",
        "{{ ('x' * 1000000).join(range(9999) | map('string')) }}",
        "{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}",
        "{{ range(9999) | list | tojson(indent=9999) }}",
        "{{ lipsum(9999, min=9998, max=9999) }}",
        "{{ strftime_now('%9999Y' * 10000) }}",
        "{% if a %}b{% endif %}" * 100_000,
        "{{ [" + "a + 1, " * 15000 + "] }}",
    ],
    ids=lambda source: source[:60],
)
def test_what_one_operation_would_be_too_long_at(source: str) -> None:
    with pytest.raises(UserError, match="SecurityError: the template"):
        render(source)


@pytest.mark.parametrize("name", ["translate", "maketrans", "encode"])
def test_methods_that_no_template_needs_are_not_there(name: str) -> None:
    with pytest.raises(UserError, match=f"SecurityError: access to attribute '{name}'"):
        render(f"{{{{ 'x'.{name}({{}}) }}}}")


@pytest.mark.parametrize(
    "source",
    [
        NUMBERS + "{% for i in range(99999) if x == y and false %}{% endfor %}",
        NUMBERS + "{{ x == y }}" * 2000,
    ],
)
def test_the_time_is_looked_at_between_comparisons(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_STEPS", 300)
    with pytest.raises(UserError, match="takes too long"):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set x = ['a' ~ 1, 'c' ~ ('d' ~ 2)] %}{{ (x + [3])[0:2] | join }}{{ {'k': x[0] ~ 'b'}['k'] }}", "a1cd2a1b"),
        ("{% for a, b in [(1, 'x' ~ 2)] if a ~ b != '1' %}{{ a ~ b }}{% endfor %}", "1x2"),
        ("{{ messages == messages and 'us' in messages[0].role and messages[0] in messages }}", "True"),
        ("{{ 'most ' ~ 32768 }} {{ 32768 | string }} {{ namespace(a=32768).a }}", "most 32768 32768 32768"),
        ("{% macro f(n) %}{{ n }}{% endmacro %}{{ f(32768) }}", "32768"),
        ("{% set x | upper %}a{{ 1 }}{% endset %}{{ x }}{% set y %}b{% endset %}{{ y }}", "A1b"),
        (
            "{% filter upper %}a{% endfilter %}"
            "{% macro m() %}({{ caller() }}){% endmacro %}{% call m() %}b{% endcall %}",
            "A(b)",
        ),
        (
            "{{ messages | map(attribute='role') | join(d='/') }}"
            "{{ messages | selectattr('role', 'equalto', 'x') | list }}",
            "user[]",
        ),
        (
            "{% for m in messages | reverse %}{{ loop.last }}{{ loop.length }}{% endfor %}"
            "{{ [[1], [2]] | sum(start=[]) }}",
            "True1[1, 2]",
        ),
        ("{{ '**{}** {:*>3}'.format('a', 1) }} {{ '{x}'.format_map({'x': 2}) }}", "**a** **1 2"),
        ("{{ [3, 1] | sort | tojson(indent=2) | length }} {{ {'b': 1, 'a': 2} | dictsort | first | first }}", "12 a"),
        ("{{ 'a' * 100000 == 'a' * 100000 }} {{ ('a b ' * 9).split() | length }}", "True 18"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_measured_is_what_it_was(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_is_not_too_much() -> None:
    source = "{% for m in messages %}{% set rest = messages[loop.index0:] %}{{ rest | length }}{% endfor %}"
    template = ChatTemplate(source, origin="t", special_tokens={})
    text = template.render([*MESSAGES * 1500], add_generation_prompt=True)
    assert text == "".join(str(1500 - turn) for turn in range(1500))


def test_each_rendering_is_counted_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_STEPS", 200)
    template = ChatTemplate("{% for i in range(60) %}.{% endfor %}", origin="t", special_tokens={})
    for _ in range(5):
        assert template.render(MESSAGES, add_generation_prompt=True) == "." * 60
