"""Hostile chat templates end within bounds of time and memory, and ordinary templates render unchanged."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eqformer.data import _template_limits, ChatTemplate
from eqformer.data._template_limits import MAX_SECONDS, MAX_SOURCE
from eqformer.data._template_sandbox import BoundedEnvironment


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hé <b>?"}, {"type": "image"}]},
    {"role": "assistant", "content": "<think>a</think> Yes. ", "calls": [{"name": "f", "arguments": {"b": [1, None]}}]},
    {"role": "tool", "content": "1"},
]
GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
DEEP = "{%% set ns = namespace(x=1) %%}{%% for i in range(100000) %%}{%% set ns.x = %s %%}{%% endfor %%}"
SIZE, LONG, INTEGER = (
    "a value of more than 4,",
    r"takes more than [\d,.]+ (steps|s)\)",
    "integer of more than 16,",
)
DEPTH = rf"(recursion|{LONG})"
# What a template asks for, and which limit it meets.
HOSTILE = {
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": LONG,
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}": LONG,
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}": LONG,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}": "recursion",
    "{% block a %}{{ self.a() }}{% endblock %}": "recursion",
    "{% for x in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{{ range(99999)|list|string|length }}{% endfor %}": LONG,
    "{% for i in range(99999) %}{% set x = range(99999)|map('string')|sort|length %}{% endfor %}": LONG,
    "{{ 'a' * 3000000000 }}": SIZE,
    "{{ 'a' * 3e9 }}": "by non-int",
    "{{ 3000000000 * [1] }}": SIZE,
    "{{ 10 ** (10 ** 8) }}": INTEGER,
    GROWING % ("3", "ns.x * ns.x"): INTEGER,
    "{{ ('f' * 400000)|int(0, 16) }}": INTEGER,
    GROWING % ("'a'", "ns.x + ns.x"): SIZE,
    GROWING % ("'a'", "ns.x ~ ns.x"): SIZE,
    GROWING % ("[]", "[ns.x, ns.x]"): SIZE,
    GROWING % ("()", "(ns.x, ns.x)"): SIZE,
    GROWING % ("{}", "{'a': ns.x.items(), 'b': ns.x.values(), 'c': ns.x}"): SIZE,
    GROWING % ("{}", "dict(a=ns.x, b=ns.x)"): SIZE,
    DEEP % "[ns.x]": DEPTH,
    DEEP % "([ns.x]|map('upper'))": DEPTH,
    DEEP % "namespace(x=ns.x, y='a' * 4000000)": "values of more than 268,",
    "{{ " + "|".join(["[1]", *["map('upper')"] * 70]) + " }}": "64 levels",
    "{{ '%1000000000d' % 1 }}": SIZE,
    "{{ '%*d' % (1000000000, 1) }}": SIZE,
    "{{ '%.1000000000f'|format(1.5) }}": SIZE,
    "{{ '{:1000000000}'.format(1) }}": SIZE,
    "{{ '{:{w}}'.format(1, w=1000000000) }}": SIZE,
    "{{ '{a:.1000000000f}'.format_map({'a': 1.5}) }}": SIZE,
    "{{ 'x'|center(1000000000) }}": SIZE,
    "{{ 'x'.center(1000000000) }}": SIZE,
    "{{ 'x'.zfill(1000000000) }}": SIZE,
    "{{ ('\\t' * 99999).expandtabs(99999) }}": SIZE,
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}": SIZE,
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}": SIZE,
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}": SIZE,
    "{{ range(99999)|join('b' * 99999) }}": SIZE,
    "{{ ('b' * 99999).join(range(9999)|map('string')) }}": SIZE,
    "{{ ('a\\n' * 99999)|indent(99999) }}": SIZE,
    "{{ ('a\\n' * 99999)|indent('b' * 99999) }}": SIZE,
    "{{ [1]|batch(1000000000, 0)|list }}": SIZE,
    "{{ [1]|slice(1000000000)|list }}": SIZE,
    "{{ [[1]]|tojson(indent=1000000000) }}": "indents JSON",
    "{{ [[1]]|tojson(separators=('a' * 99999, 'b')) }}": "indents JSON",
    "{{ 5|round(-1000000000) }}": "rounds to more",
    "{{ ('a' * 99999)|wordwrap(1) }}": "wordwrap takes at most",
    "{{ ([[1, 2, 3]] * 9999)|sum(start=[]) }}": "one by one",
    "{{ ('a' * 400000).strip('b' * 400000) }}": "one by one",
    "{{ ('a' * 400000).rfind('b' * 400000) }}": "one by one",
    "{{ lipsum(n=1000000000) }}": "undefined",
    "{% set s %}{% for i in range(9999) %}{{ 'a' * 299999 }}{% endfor %}{% endset %}": "values of more than",
    "{% for i in range(9999) %}{{ messages[0].content * 999 }}{% endfor %}": SIZE,
    "{% set a = 'a' * 99999 %}{% set b = [" + "a, " * 9999 + "] %}": SIZE,
    "{% set a = 'a' * 99999 %}{{ " + "a ~ " * 999 + "a }}": SIZE,
    "{{ raise_exception('a' * 4000000) }}": r"aaa \.\.\. aaa",
    "{{ a }}" * 10_000: f"at most {MAX_SOURCE:,} are read",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}": "recursion",
    "{% if a %}" * 300 + "{% endif %}" * 300: "recursion",
    "{{ " + "1 + " * 1000 + "1 }}": "recursion",
    "{{ " + "9" * 10_000 + " }}": "digits",
}


def template_of(folder, source) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder)


@pytest.mark.parametrize("every,seconds", [(5, 0.05), pytest.param(1, MAX_SECONDS, marks=pytest.mark.grid)])
def test_hostile_templates_end_at_a_limit(every, seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(_template_limits, "MAX_SECONDS", seconds)
    for source, words in list(HOSTILE.items())[::every]:
        words = words if seconds == MAX_SECONDS else rf"({words}|{LONG})"
        start = time.thread_time()
        place = r"^ChatTemplate(\(.*\)|.render\(messages\)): the template in chat_template.jinja"
        with pytest.raises(ValueError, match=f"{place} .*{words}"):
            template_of(tmp_path, source).render(TALK)
        assert time.thread_time() - start < 1 + seconds, source


TEXT = "' Ab <i>c d '|"
OF_TEXT = """capitalize e escape forceescape length count list lower upper title trim urlencode urlize wordcount safe
striptags wordwrap pprint reverse first last""".split()
# An expression for each filter of jinja2.
FILTERS = {
    **{name: f"-5.5|{name}" for name in "abs float int round string filesizeformat d default".split()},
    **{name: TEXT + name for name in OF_TEXT},
    **{name: f"[3, 1, 2]|{name}" for name in ("max", "min", "sort", "sum", "join", "tojson")},
    **{name: f"{{'b': 1, 'a': 'c'}}|{name}" for name in ("dictsort", "xmlattr")},
    "attr": "messages|attr('x')",
    "batch": "range(5)|batch(2, 'x')|list",
    "center": "'x'|center(9)",
    "format": "'%s %05.1f %%'|format('x', 1.25)",
    "groupby": "messages|groupby('role')|map('first')|list",
    "indent": "'a\\nb'|indent(2, true)",
    "items": "messages[2].calls[0].arguments|items|list",
    "map": "messages|map(attribute='role')|map('upper')|list",
    "random": "[1]|random",
    "reject": "[1, 2]|reject('odd')|list",
    "rejectattr": "messages|rejectattr('role', 'equalto', 'tool')|list",
    "replace": "'abab'|replace('b', 'cc', 1)",
    "select": "[1, 2]|select('divisibleby', 2)|list",
    "selectattr": "messages|selectattr('calls', 'defined')|list",
    "slice": "range(5)|slice(2, 'x')|list",
    "truncate": "'one two three'|truncate(9)",
    "unique": "[1, 1, 2]|unique|list",
}
# Operators, methods and functions, of which some are bounded; a line each.
MORE = """1 + 2 * 3 ** 2 - 7 // 2 % 2
[1] + [2] * 2
'a' * 3 ~ none ~ [1, 'b']
-2 ** 2
2 ** -1
7 / 2
[1, 2][::-1]
'%d%%' % 3
'%(a)s' % {'a': [1]}
'{:>5} {a[0]}'.format('x', a=[1])
'{a}'.format_map({'a': 1})
('<b>{}'|e).format('<')
'a,b'.split(',')|join('; ')
'-'.join(['a', 'b'])
('<b>'|e).join(['<', 'x'])
'x'.center(5)
' x '.strip(' ')
'aXa'.replace('a', 'b')
'a\\tb'.expandtabs(4)
'ab'.translate({97: 'x'})
'a b'.rsplit(' ', 1)
(3).to_bytes(2, 'big')
messages[1:]|length
{'a': (1, 2)}
'b' in 'abc'
1 < 2 < 3
messages|join(', ', attribute='role')
[[1], [2]]|sum(start=[])
[{'a': 'é'}, 'b']|tojson(indent=2)
dict(a=1).items()|list
range(3)|list
joiner(', ')()
none
x
1 if x
3 is odd and 3 is not divisibleby(2) and 3 is in([3]) and 3 is eq(3) and 3 is ge(2) and x is undefined
'upper' is filter and 'odd' is test and range is callable and 'a' is string and [] is sequence
2 is gt 1 and {} is mapping and none is none and 1.5 is float and true is true and 'A' is upper""".splitlines()
# Statements as published templates have them.
STATEMENTS = """{%- macro text(content, deep=false) -%}
{%- if content is string %}{{ content }}{% elif content is iterable and content is not mapping -%}
{%- for part in content if part.type == 'text' %}{{ text(part.text) }}{{ '' if loop.last else ', ' }}
{%- else %}-{% endfor %}
{%- endif %}{%- endmacro -%}
{% set ns = namespace(last=-1, texts=[]) %}
{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for message in messages[::-1] if message.role not in ['system'] %}
<|{{ message['role'] }}|>{{ loop.index }}/{{ loop.length }} {{ text(message.content) }} {{ loop.revindex }}
{%- if message.calls %}{% for call in message.calls %}{% for key, value in call.arguments.items() %}
{{ key }}={{ value | tojson }}{% endfor %}{% endfor %}{% endif %}
{% set ns.texts = ns.texts + [message.role] %}{{ loop.previtem.role if loop.previtem is defined }}
{{ loop.cycle('a', 'b') }}
{% endfor %}{% set block %}{{ ns.texts }}{{ ns.last }}{% endset %}{{ block | trim }}
{% for part in [{'n': 1, 'in': [{'n': 2}]}] recursive %}{{ part.n }}{{ loop(part['in']) if part['in'] }}{% endfor %}
{% macro around() %}[{{ caller() }}]{% endmacro %}{% call around() %}y{% endcall %}
{% filter upper %}{{ bos_token }}a{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}
{% for (a, b) in [(1, 2)] %}{{ a + b }}{% endfor %}{% set c, d = 1, 2 %}{{ c }}{{ d }}{{ self.__class__ }}"""


BOUNDED = BoundedEnvironment(None)
PLAIN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
PLAIN.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)


def plain_text(source: str) -> str:
    """What jinja2's own sandbox renders."""
    return PLAIN.from_string(source).render(messages=TALK)


def bounded_text(source: str) -> str:
    return "".join(piece.text for piece in BOUNDED.compile_template(source)({"messages": TALK}))


def test_templates_render_as_in_the_plain_sandbox():
    assert FILTERS.keys() == BOUNDED.filters.keys()
    for expression in [*FILTERS.values(), *MORE]:
        source = "{{ " + expression + " }}|{% for i in [1] %}{{ " + expression + " }}{% endfor %}"
        assert bounded_text(source) == plain_text(source), expression
    text = bounded_text(STATEMENTS)
    assert text == plain_text(STATEMENTS) and len(text) > 100


def test_json_is_written_with_the_options_of_transformers():
    assert bounded_text("{{ 'é'|tojson(ensure_ascii=False) }}{{ 'é'|tojson(ensure_ascii=true) }}") == '"é""\\u00e9"'
    options = "{{ {'b': [1], 'a': 2}|tojson(separators=(',', ':'), sort_keys=True) }}"
    assert bounded_text(options) == '{"a":2,"b":[1]}'


def test_a_long_conversation_has_more_room(tmp_path, monkeypatch):
    monkeypatch.setattr(_template_limits, "MAX_SIZE", 1 << 16)
    loop = "{% for m in messages %}{% set x = m.content * 2 %}{{ m.content | trim }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}] * 200
    assert len(template_of(tmp_path, loop).render(messages)) == 200_000


def test_threads_have_budgets_of_their_own(tmp_path, monkeypatch):
    template = template_of(tmp_path, "{% for i in range(n) %}{% for j in range(100) %}{% endfor %}{% endfor %}done")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: template.render(TALK, n=20), range(8))) == {"done"}
    monkeypatch.setattr(_template_limits, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match="takes more than"):
        template.render(TALK, n=2000)
    assert template.render(TALK, n=1) == "done"
