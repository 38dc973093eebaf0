"""Chat templates: B8, and A2 of the failure cases (hostile templates and arguments)."""

import pathlib
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.configs.errors import LoadError
from octavo.engine.errors import RequestError
from octavo.engine.text import sandbox
from octavo.engine.text.chat_template import ChatTemplate, normalise_messages
from tests.references.byte_tokenizer import CHAT_TEMPLATE

PARTS = "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}{{ part.text }}{% endfor %};{% endfor %}"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def chatml() -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE)


def test_generation_prompt(chatml: ChatTemplate) -> None:
    text = chatml.render([{"role": "system", "content": "Be brief."}, USER])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render([USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("content", ["Sure:\n", "Sure ", "Sure\t", "Sure", "", "<|im_end|>\n"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PARTS, CHAT_TEMPLATE.replace("['content']", "['content'] | trim")])
def test_continued_messages_end_with_their_exact_content(template: str, content: str) -> None:
    """B060"""
    messages = [USER, {"role": "assistant", "content": content}]
    text = ChatTemplate(template).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(content)
    assert "END" not in text
    assert messages[1]["content"] == content


def test_what_cannot_be_continued(chatml: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        chatml.render([USER, {"role": "assistant", "content": "a"}], continue_final_message=True)
    with pytest.raises(RequestError, match="role 'user'"):
        chatml.render([USER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the final message out"):
        ChatTemplate("x").render(
            [{"role": "assistant", "content": "a"}], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PARTS])
def test_content_as_text_or_as_parts_is_the_same(template: str, role: str) -> None:
    """B063"""
    compiled = ChatTemplate(template)
    text = compiled.render([{"role": role, "content": "result"}])
    assert "result" in text
    assert compiled.render([{"role": role, "content": [{"type": "text", "text": "result"}]}]) == text
    assert compiled.render([{"role": role, "content": ["result"]}]) == text


def test_templates_that_want_parts() -> None:
    assert ChatTemplate(PARTS).wants_parts
    assert ChatTemplate(
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}"
    ).wants_parts
    assert not ChatTemplate(CHAT_TEMPLATE).wants_parts
    both = (
        "{% for m in messages %}{% if m.content is string %}{% else %}{% for p in m.content %}{% endfor %}{% endif %}"
    )
    assert not ChatTemplate(both + "{% endfor %}").wants_parts


def test_null_content_and_empty_tool_calls() -> None:
    """B064, B065"""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}, "the caller's message is not changed"
    (message,) = normalise_messages([{"role": "assistant", "content": "x", "tool_calls": [], "name": None}])
    assert message == {"role": "assistant", "content": "x"}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must not be empty"),
        ("Hi", "must be a list"),
        (None, "must be a list"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": 5, "content": "Hi"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([USER, {"role": "user", "content": 5}], r"messages\[1\].content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "function must be"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments must be JSON",
        ),
    ],
)
def test_malformed_messages(chatml: ChatTemplate, messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chatml.render(messages)  # type: ignore[arg-type]


def test_the_template_says_no() -> None:
    """B067: its own words come through."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    for _ in range(100):
        with pytest.raises(RequestError, match="System role not supported"):
            template.render([{"role": "system", "content": "x"}])
    assert template.render([USER]) == "Hi"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tokenize": True},
        {"tools": []},
        {"chat_template": "x"},
        {"messages": []},
        {"bos_token": "x"},
        {" budget": 1},
        {"_x": 1},
        {"add_generation_prompt": False},
        {"raise_exception": 1},
    ],
)
def test_arguments_must_not_replace_ours(chatml: ChatTemplate, kwargs: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        chatml.render([USER], template_kwargs=kwargs)


def test_other_arguments_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}{{ tools }}", {"bos_token": "<s>"})
    assert template.render([USER], template_kwargs={"enable_thinking": False}) == "False<s>None"


def test_a_template_that_does_not_compile() -> None:
    for source in (
        "{% for %}",
        "{{ 'x' | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ x" + "| list" * 300 + " }}",
        "x" * 200_000,
    ):
        with pytest.raises(LoadError, match="does not compile"):
            ChatTemplate(source)
        with pytest.raises(RequestError, match="does not compile") as caught:
            ChatTemplate.from_request(source)
        assert caught.value.field == "chat_template"
    with pytest.raises(RequestError, match="chat_template must be a string, got int"):
        ChatTemplate.from_request(5)
    assert ChatTemplate.from_request("{{ eos_token }}", {"eos_token": "</s>"}).render([USER]) == "</s>"


@pytest.mark.parametrize("tools", ["x", 5, {"name": "f"}, ["f"], [None]])
def test_tools_that_are_no_definitions(chatml: ChatTemplate, tools: object) -> None:
    with pytest.raises(RequestError, match="tools") as caught:
        chatml.render([USER], tools=tools)  # type: ignore[arg-type]
    assert caught.value.field == "tools"


def test_blocks_macros_and_filters_still_work() -> None:
    source = (
        "{% macro m(a, b=2) %}<{{ a }}{{ caller() if caller }}{{ b }}>{% endmacro %}{{ m(1) }}"
        "{% call m(3) %}c{% endcall %}{% set x %}{{ 1 }}a{% endset %}{{ x }}{% set y | upper | trim %} ab {% endset %}"
        "{{ y }}{% filter upper %}z{{ 'q' }}{% endfilter %}"
        "|{{ messages | map(attribute='role') | join(',') }}|{{ messages[::-1] | length }}|{{ 'a' ~ 1 ~ none }}"
        "|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "|{{ [3, 1, 2] | sort | reverse | list }}"
        "|{{ [1, 2] | sum }}|{{ 'a,b'.split(',')[-1] }}|{{ {'a': 1} | items | list }}|{{ [1] + [messages | length] }}"
        "|{{ '%s-%d' | format('a', 3) }}|{{ x is string and 'a' in x }}"
        "|{{ missing | default('d') }}|{{ 2.55 | round(1) }}"
    )
    wanted = "<12><3c2>1aABZQ|user|1|a1None|1|[3, 2, 1]|3|b|[('a', 1)]|[1, 1]|a-3|True|d|2.5"
    assert ChatTemplate(source).render([USER]) == wanted


@given(st.text())
def test_user_text_is_only_text(content: str) -> None:
    chatml = ChatTemplate(CHAT_TEMPLATE)
    assert chatml.render([{"role": "user", "content": content}]) == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_templates_expect() -> None:
    source = (
        "{%- for i in range(6) -%}\n  {%- if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif -%}"
        "\n{{ i }}\n{%- endfor %}|{% generation %}body{% endgeneration %}|{{ x | tojson }}|"
        "{{ [1, 2] | join('-') }}|{{ 'a.b'.replace('.', '/') }}|{{ '%02d' % 7 }}|{{ '{:>3}'.format(7) }}|"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    text = ChatTemplate(source).render([USER, USER], template_kwargs={"x": {"é": "<日>"}})
    assert text == '023|body|{"é": "<日>"}|1-2|a/b|07|  7|2'
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])) == 10


LOOP = "{% for a in range(100000) %}"
HOSTILE = [
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [0] * 10**9 }}",
    LOOP + LOOP + "{% endfor %}{% endfor %}",
    LOOP + LOOP + "{% if 0 %}{% endif %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 9**9**9 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.zfill(999999999) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('y' * 1000000).join('x' * 1000000) }}",
    "{{ ['x' * 1000000] | join | replace('x', 'y' * 1000000) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    LOOP + "{{ 'x' * 1000 }}{% endfor %}",
    "{% set l = [1] * 16000000 %}{{ l | sort | sort | sort | length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}{% set ns.x = ns.x + [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}{% endfor %}",
    "{{ (['a' * 1000000] * 200) | tojson | length }}",
    "{{ (['a' * 1000000] * 200) | string | length }}",
    "{{ ('{0}' * 100).format('a' * 2000000) | length }}",
    "{{ ('%(a)s' * 100 % {'a': 'a' * 2000000}) | length }}",
    "{{ ('%s' * 100 | format(*(['a' * 2000000] * 3))) | length }}",
    "{{ ('%(a)s' * 100) | format(a='a' * 2000000) | length }}",
    "{{ ('<' * 8000000) | e | e | e | length }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ ('a' * 8000000) | list | map('upper') | list | length }}",
    "{{ ('a' * 8000000) | groupby('x') | list | length }}",
    "{{ ('a' * 8000000) | title }}",
    "{{ ('a' * 8000000).split('a') | length }}",
    "{{ ('\\n' * 8000000) | indent(60) | length }}",
    "{{ [[1] * 1000] | tojson(separators=('a' * 100000, ':')) | length }}",
    "{{ 1.5 | round(10**9, 'floor') }}",
    "{{ ('f' * 1000000) | int(base=16) }}",
    "{{ ('a' * 8000000).strip('b' * 4000000 + 'a') | length }}",
    "{{ ('a' * 8000000) | trim('b' * 4000000 + 'a') | length }}",
    "{{ ('a' * 8000000).rfind('a' * 4000000 + 'b' + 'a') }}",
    "{{ ('<!---->' * 1000000 | safe).striptags() }}",
    "{{ ([[1] * 1000] * 90) | sum(start=[]) | length }}",
    "{% set s = 'a' * 8000000 %}{{ (" + "s ~ " * 1000 + "s) | length }}",
    "{% macro m() %}{% for i in range(1000) %}{{ 'a' * 8000000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set x %}{% for i in range(100000) %}" + "a" * 10000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = ns.l + ['a' * 8000000] %}{% endfor %}",
    LOOP + "{% if 'b' in 'a' * 8000000 %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 8000000 %}" + "{% if s + 'b' in s %}{% endif %}" * 2000,
    "{{ range(100000) " + "| select " * 80 + "| list | length }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1.0)
    template = ChatTemplate(source)
    begin = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="chat template"):
            template.render([USER])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 3
    assert peak < 1 << 30


def test_templates_cannot_reset_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_BYTES", 1 << 20)
    source = "{% for i in range(100) %}{{ ('a' * 100000) | length }}{{ [-10**9] | map(' step') | list }}{% endfor %}"
    with pytest.raises(RequestError, match="builds more than"):
        ChatTemplate(source).render([USER])


def test_a_template_that_only_burns_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    source = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    with pytest.raises(RequestError, match=r"longer than 0\.2 seconds"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "expression",
    [
        "cycler.__init__.__globals__.os.popen('touch {}').read()",
        "joiner.__init__.__globals__",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.append(1)",
        "messages[0].update({{'role': 'x'}})",
        "raise_exception.__globals__",
        "range.__globals__",
        "(messages | attr('__class__')).__base__",
        "'{{0.__class__.__mro__}}'.format(messages)",
        "namespace.__init__.__globals__",
        "lipsum.__globals__",
    ],
)
def test_no_way_out_of_the_sandbox(expression: str, tmp_path: pathlib.Path) -> None:
    """A2: a model's template cannot reach Python, or change what the caller passed."""
    file = tmp_path / "pwned"
    messages = [dict(USER)]
    try:
        text = ChatTemplate("{{ (" + expression.format(file) + ") | string }}").render(messages)
    except RequestError:
        text = ""
    assert text == "", "nothing, where it is no error"
    assert not file.exists()
    assert messages == [USER]


def test_string_methods_in_loops_and_blocks() -> None:
    """jinja hands calls there its own variables as well, which the checked methods must not see."""
    source = (
        "{% for m in messages %}{% set x = m.content.replace('i', 'o') %}{{ x }}{{ '-'.join([x, x]) }}{% endfor %}"
        "{% block b %}{{ 'aba'.replace('a', 'c') }}{% endblock %}"
    )
    assert ChatTemplate(source).render([USER]) == "HoHo-Hocbc"
