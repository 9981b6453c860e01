"""Templates render as in the reference engine, fail with clear errors, and are sandboxed."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assets import default_model
from penstock.errors import CheckpointError, ConfigError, RequestError
from penstock.serve.openai.requests import parse_chat
from penstock.text import template_worker
from penstock.text.template import ChatTemplate

OWN_TEMPLATE = default_model() / "chat_template.jinja"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def published(shared_data: Path) -> str:
    return (shared_data / "qwen3.5" / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> list[dict]:
    lines = (
        (shared_data / "qwen3.5" / "golden_renders.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert len(lines) == 15
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def templates(published: str) -> dict[str, ChatTemplate | Oracle]:
    own = OWN_TEMPLATE.read_text(encoding="utf-8")
    return {
        "published": ChatTemplate(published),
        "published, reference": Oracle(published),
        "own": ChatTemplate(own),
        "own, reference": Oracle(own),
    }


class Oracle:
    """The same template in jinja2's sandbox, configured as in transformers."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        environment.globals["raise_exception"] = self._raise
        self._template = environment.from_string(source)

    @staticmethod
    def _raise(message: str) -> None:
        raise jinja2.TemplateError(message)

    def render(self, messages: list[dict], **variables: Any) -> str | None:
        """None if the template refuses."""
        try:
            return self._template.render(
                messages=messages, **{"add_generation_prompt": True, **variables}
            )
        except jinja2.TemplateError:
            return None


def render_or_none(template: ChatTemplate, messages: list[dict], **variables: Any) -> str | None:
    try:
        return template.render(messages, **variables)
    except RequestError:
        return None


def test_the_published_template_gives_the_golden_renders(
    published: str, golden: list[dict]
) -> None:
    template = ChatTemplate(published)
    for case in golden:
        if "rendered" in case:
            assert template.render(**case["inputs"]) == case["rendered"], case["name"]
        else:
            with pytest.raises(RequestError) as refusal:
                template.render(**case["inputs"])
            assert refusal.value.what == case["error"], case["name"]
            assert refusal.value.param == "messages"


def test_our_own_template_gives_the_golden_renders(golden: list[dict]) -> None:
    template = ChatTemplate(OWN_TEMPLATE.read_text(encoding="utf-8"))
    for case in golden:
        expected = (
            None if case["name"] == "image_part" else case.get("rendered")
        )  # ours accepts text only
        inputs = {
            "enable_thinking": True,
            **case["inputs"],
        }  # the small sizes think only when asked
        assert render_or_none(template, **inputs) == expected, case["name"]


TEXT = st.text(st.sampled_from("ab<>&'\"é漢🚀{}% \t\n\x1c\u00a0\u2028"), max_size=8)
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_response>", "</tool_response>", "\n\n", "x", " "]
)
CONTENT_TEXT = st.one_of(TEXT, st.lists(st.one_of(PIECES, TEXT), max_size=6).map("".join))
CONTENT = st.one_of(
    CONTENT_TEXT,
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, CONTENT_TEXT), max_size=3),
)
# Numbers that Python writes with an exponent are written out in full by minijinja; these are not.
NUMBERS = st.integers(-(2**40), 2**40) | st.integers(-(2**20), 2**20).map(
    lambda eighths: eighths / 8
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        st.sampled_from(["f", "get_weather"]),
        st.dictionaries(st.sampled_from(["a", "city", "é"]), VALUES, max_size=3),
    ),
    max_size=3,
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.one_of(st.none(), CONTENT)},
    optional={"reasoning_content": st.one_of(st.none(), CONTENT_TEXT), "tool_calls": CALLS},
)


def spoken_by(*roles: str) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": CONTENT})


LATER = spoken_by(*["user"] * 3, *["tool"] * 6, "system", "robot")
CONVERSATIONS = st.tuples(
    st.lists(spoken_by("system"), max_size=1),
    st.lists(spoken_by("user"), min_size=1, max_size=1) | st.lists(LATER, max_size=1),
    st.lists(ASSISTANT | ASSISTANT | LATER, max_size=6),
).map(lambda parts: parts[0] + parts[1] + parts[2])
TOOLS = st.one_of(st.none(), st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=2))
THINKING = st.sampled_from([{"enable_thinking": True}, {"enable_thinking": False}])


@settings(max_examples=100, deadline=None)
@given(CONVERSATIONS, TOOLS, THINKING, st.booleans())
def test_any_conversation_renders_as_the_reference_renders_it(
    templates, messages, tools, thinking, prompt
) -> None:
    variables = {"tools": tools, "add_generation_prompt": prompt, **thinking}
    ours = render_or_none(templates["published"], messages, **variables)
    assert ours == templates["published, reference"].render(messages, **variables)


@settings(max_examples=100, deadline=None)
@given(
    CONVERSATIONS.filter(lambda m: not m or m[0]["role"] != "tool"), TOOLS, THINKING, st.booleans()
)
def test_our_own_template_renders_what_the_published_one_does(
    templates, messages, tools, thinking, prompt
) -> None:
    """Conversations that start with a tool's result are excluded: the published template omits
    their header.
    """
    variables = {"tools": tools, "add_generation_prompt": prompt, **thinking}
    expected = render_or_none(templates["published"], messages, **variables)
    assert render_or_none(templates["own"], messages, **variables) == expected
    assert templates["own, reference"].render(messages, **variables) == expected


def test_rendering_leaves_the_conversation_as_it_was() -> None:
    template = ChatTemplate("{% do messages.clear() %}{% do tools[0].clear() %}done")
    messages, tools = copy.deepcopy(HELLO), [{"a": 1}]
    assert template.render(messages, tools=tools) == "done"
    assert (messages, tools) == (HELLO, [{"a": 1}])


def test_arguments_may_be_the_json_string_of_the_api(published: str) -> None:
    def conversation(arguments: Any) -> list[dict]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]

    template = ChatTemplate(published)
    assert template.render(conversation('{"a": [1, "é"]}')) == template.render(
        conversation({"a": [1, "é"]})
    )
    assert template.render(conversation("")) == template.render(conversation({}))
    for broken, read in (('{"a": 1, "b', {"a": 1}), ("[1]", {"arguments": "[1]"})):
        assert template.render(conversation(broken)) == template.render(conversation(read))


def test_json_keeps_order_and_characters() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}|{{ messages[0].b | tojson(indent=2) }}")
    message = {"b": {"z": "<é'&>"}, "a": [1.0, True, None]}
    expected = (
        json.dumps(message, ensure_ascii=False)
        + "|"
        + json.dumps(message["b"], ensure_ascii=False, indent=2)
    )
    assert template.render([message]) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}.", "."),
        ("a {%- generation -%} b {%- endgeneration %} c", "ab c"),
        ("{{ tools is defined }} {{ tools }}", "False "),
        ("{{ 'a\nb\n\nc' | indent(2) }}", "a\n  b\n\n  c"),
        ("{{ 'a\nb' | indent(1, first=true) }}", " a\n b"),
        (
            "{{ messages[0].x | string }} {{ 0.1 | string }} {{ true }} {{ none }}",
            "2.0 0.1 True None",
        ),
        ("{%- if true %}\n  x\n  {% endif %}y", "  x\ny"),
    ],
)
def test_what_templates_in_the_wild_rely_on(source: str, expected: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "Hi", "x": 2.0}]) == expected


def test_variables_of_a_request_reach_the_template_but_not_its_own() -> None:
    template = ChatTemplate("{{ flavour }}{{ range(2) | length }}{{ messages | length }}")
    assert template.render(HELLO, flavour="sour", unused=1) == "sour21"
    assert template.variables == {"flavour"}
    with pytest.raises(RequestError, match="chat_template"):
        template.render(HELLO, chat_template="{{ 1 }}")
    assert template.render(HELLO, self=1, flavour="") == "21"


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": {1, 2, object()}}], [{"role": object()}], ["text"], [None]],
)
def test_messages_that_are_no_data_are_refused(published: str, messages: list) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(published).render(messages)


@pytest.mark.parametrize("depth", [500, 2_000, 100_000])
def test_deep_nesting_is_rendered_or_refused(depth: int) -> None:
    value: list = []
    for _ in range(depth):
        value = [value]
    rendered = render_or_none(
        ChatTemplate("{{ messages[0].content | tojson }}"), [{"content": value}]
    )
    assert rendered in (None, "[" * (depth + 1) + "]" * (depth + 1))


def folder_with(tmp_path: Path, name: str, content: object) -> Path:
    (tmp_path / name).write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )
    return tmp_path


@pytest.mark.parametrize(
    "found",
    [
        "found {{ bos }}",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "found"}],
    ],
)
def test_templates_are_found_in_the_tokenizer_config(tmp_path: Path, found: object) -> None:
    folder = folder_with(tmp_path, "tokenizer_config.json", {"chat_template": found})
    assert ChatTemplate.load(folder).render(HELLO).strip() == "found"
    folder_with(tmp_path, "chat_template.jinja", "file")
    assert ChatTemplate.load(folder).render(HELLO) == "file"
    assert ChatTemplate.load(folder / "tokenizer.json").render(HELLO) == "file"


def test_templates_can_name_the_special_tokens(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    folder_with(tmp_path, "tokenizer_config.json", config)
    template = ChatTemplate.load(
        folder_with(tmp_path, "chat_template.jinja", "{{ bos_token }}x{{ eos_token }}")
    )
    assert template.render(HELLO) == "<s>x</s>"
    assert template.variables == set()


def test_no_path_is_the_embedded_models_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert ChatTemplate.load(None).source == OWN_TEMPLATE.read_text(encoding="utf-8")
    assert ChatTemplate.load(default_model()).variables == {"enable_thinking"}


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    folder_with(tmp_path, "tokenizer_config.json", {"eos_token": "x"})
    with pytest.raises(RequestError, match="no chat template") as refusal:
        ChatTemplate.load(tmp_path).render(HELLO)
    assert "chat_template.jinja" in refusal.value.todo
    assert "tokenizer's config" in refusal.value.why
    assert str(tmp_path) not in str(refusal.value)


def test_a_clients_error_has_the_line_that_failed_and_not_the_models_folder(
    tmp_path: Path,
) -> None:
    template = ChatTemplate.load(
        folder_with(tmp_path, "chat_template.jinja", "\n{{ messages[0].a.b.c }}")
    )
    with pytest.raises(RequestError, match=r"Line 2 of chat_template\.jinja: ") as refusal:
        template.render(HELLO)
    assert str(tmp_path) not in str(refusal.value)


def test_a_request_replaces_nothing_that_a_template_calls_or_writes() -> None:
    template = ChatTemplate("{{ bos_token }}", special_tokens={"bos_token": "<s>"})
    functions = template_worker._compiled("", ()).globals
    assert {"raise_exception", "strftime_now", "namespace", "range"} <= functions.keys()
    for name in (*functions, "bos_token"):
        with pytest.raises(RequestError, match=name) as refusal:
            template.render(HELLO, **{name: 1})
        assert refusal.value.param == "chat_template_kwargs"
        body = {"messages": HELLO, "chat_template_kwargs": {name: 1}}
        with pytest.raises(RequestError, match=name):
            parse_chat(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{% if x %}"),
        ("chat_template.jinja", "{{ 1 "),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": []}),
        ("tokenizer_config.json", "{nonsense"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_template_that_does_not_parse_is_a_checkpoint_error(
    tmp_path: Path, name: str, content: object
) -> None:
    with pytest.raises(CheckpointError):
        ChatTemplate.load(folder_with(tmp_path, name, content))


def test_long_conversations_have_fuel_enough(published: str) -> None:
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": []},
    ]
    for source in (published, OWN_TEMPLATE.read_text(encoding="utf-8")):
        assert ChatTemplate(source).render(turn * 5_000).count("<|im_start|>") == 10_001


ATTRIBUTES = [
    "__class__",
    "__init__",
    "__globals__",
    "__dict__",
    "__mro__",
    "__subclasses__",
    "__reduce__",
    "_lowlevel",
]
TARGETS = [
    "''",
    "[]",
    "{}",
    "messages",
    "messages[0]",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "self",
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_python_cannot_be_reached(target: str, attribute: str) -> None:
    """Each is refused or undefined; no attribute is ever found, called or not, dotted or not."""
    for access in (
        f"{target}.{attribute}",
        f"{target}['{attribute}']",
        f"({target} | attr('{attribute}'))",
    ):
        for claim in (f"{access} is defined and {access} is not none", f"{access}()"):
            assert not render_or_none(ChatTemplate("{{ 'FOUND' if " + claim + " }}"), HELLO)


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ open('/etc/passwd') }}"],
)
def test_files_cannot_be_read(source: str) -> None:
    assert render_or_none(ChatTemplate(source), HELLO) is None


# A template instead of the model's own


def test_a_chosen_file_is_used_instead_of_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!{{ eos_token }}")
    assert (
        ChatTemplate.load(None, str(file))
        .render(HELLO)
        .startswith(f"{HELLO[0]['content']}!<|im_end|>")
    )


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_the_template_without_thoughts_never_opens_one(variables: dict[str, bool]) -> None:
    """Otherwise it equals the tiny model's, which is of the Qwen3.5 family."""
    own, quiet = ChatTemplate.load(None), ChatTemplate.load(None, "no-think")
    assert quiet.variables == frozenset()
    assert quiet.render(HELLO, **variables) == own.render(HELLO, enable_thinking=False)
    rest = [source.partition("-#}")[2].rpartition("{%- if add_generation_prompt -%}")[0] for source in (
        own.source or "", quiet.source or "",
    )]  # fmt: skip
    assert rest[0] == rest[1] != ""


def test_a_chosen_file_that_is_not_there_or_no_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        ChatTemplate.load(None, str(tmp_path / "missing.jinja"))
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match=r"broken\.jinja"):
        ChatTemplate.load(None, str(tmp_path / "broken.jinja"))
