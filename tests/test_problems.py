"""The problems are correct, training never sees held-out ones, and both format turns alike."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from penstock.assets import default_model
from penstock.errors import ConfigError
from penstock.eval import held_out
from penstock.eval.conversation import Conversation, ExactCalls, ExactText, FinalNumber, Mentions
from penstock.eval.reply import CALL_END, Call, Reply, parse_calls, write_calls
from penstock.eval.spot_checks import QUESTIONS
from penstock.text.template import ChatTemplate
from training.encode import render_prompt
from training.problems import (
    harness_sums,
    recall,
    refusals,
    small_talk,
    spot_checks,
    tool_calls,
    tool_choice,
    word_problems,
)
from training.problems import held_out as written
from training.problems.draw import is_held_out
from training.problems.invented_tools import invent_tool
from training.problems.measure_scenes import hours_to_minutes
from training.problems.mixture import SHARES, sample_training
from training.problems.names import PEOPLE, THINGS
from training.problems.refusals import ANSWERED_BY_TALK, REFUSAL
from training.problems.tool_calls import CATALOG, Errand, draw_errand
from training.problems.topics import UNKNOWN
from training.tokenizer import CONTROL_TOKENS, PLAIN_TOKENS, Model, save_tokenizer, train_tokenizer

KINDS = {
    "word_problems": word_problems,
    "spot_checks": spot_checks,
    "harness_sums": harness_sums,
    "tool_calls": tool_calls,
    "tool_choice": tool_choice,
    "refusals": refusals,
    "recall": recall,
    "small_talk": small_talk,
}
OWN_TEMPLATE = default_model() / "chat_template.jinja"
EQUATION = re.compile(r"\d[\d +*/-]*(?: = [\d +*/-]*\d)+")
# Numbers that words mean: twice, half, a dozen, hours, percent (a tenth, a fifth, a quarter).
SAID_IN_WORDS = {2, 3, 4, 5, 6, 10, 12, 60}


def draw(kind: ModuleType, num: int, held_out: bool = False, seed: int = 1) -> list[Conversation]:
    rng = Random(seed)
    return [kind.sample(rng, held_out) for _ in range(num)]


def work_of(conversation: Conversation) -> str:
    turn = conversation.messages[-1]
    return (
        turn["reasoning_content"]
        if conversation.enable_thinking
        else turn["content"].rpartition("\n")[0]
    )


def question_of(conversation: Conversation) -> str:
    return str(conversation.messages[-2]["content"])


@pytest.mark.parametrize("held_out", [False, True])
def test_every_equation_of_a_solution_holds_and_the_last_gives_the_answer(held_out: bool) -> None:
    for conversation in draw(word_problems, 1500, held_out):
        equations = EQUATION.findall(work_of(conversation))
        assert equations, conversation
        for equation in equations:
            values = {eval(side) for side in equation.split(" = ")}
            assert len(values) == 1, equation
        assert isinstance(conversation.check, FinalNumber)
        answer = int(equations[-1].rpartition(" = ")[2])
        assert 0 <= answer == conversation.check.value <= 999
        assert conversation.messages[-1]["content"].endswith(f"\n#### {answer}")


def test_every_operand_is_given_or_was_computed_before() -> None:
    for conversation in draw(word_problems, 1500):
        known = set(map(int, re.findall(r"\d+", question_of(conversation)))) | SAID_IN_WORDS
        for equation in EQUATION.findall(work_of(conversation)):
            first, *_, last = equation.split(" = ")
            operands = set(map(int, re.findall(r"\d+", first)))
            assert operands <= known, (question_of(conversation), equation)
            known.add(int(last))


def test_irrelevant_numbers_are_given_too() -> None:
    unused = 0
    for conversation in draw(word_problems, 500):
        told = set(re.findall(r"\d+", question_of(conversation)))
        unused += not told <= set(re.findall(r"\d+", work_of(conversation)))
    assert 50 < unused < 250


def test_spot_checks_have_the_value_of_what_they_ask() -> None:
    signs = {
        "plus": "+",
        "sum": "+",
        "added": "+",
        "minus": "-",
        "difference": "-",
        "take away": "-",
    }
    signs |= {"times": "*", "product": "*", "multiplied": "*", " x ": "*", "×": "*"}
    signs |= {"divided": "/", "over": "/", "÷": "/"}
    for conversation in draw(spot_checks, 3000):
        question = question_of(conversation).lower()
        a, b = map(int, re.findall(r"\d+", question))
        written = re.search(r"\d ?([-+*/]) ?\d", question)
        sign = (
            written[1]
            if written
            else next(sign for word, sign in signs.items() if word in question)
        )
        assert eval(f"{a} {sign} {b}") == int(conversation.messages[-1]["content"])


def test_calls_have_the_types_of_their_schemas_and_the_values_of_the_request() -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    seen = Counter[str]()
    for conversation in draw(tool_calls, 4000):
        if not isinstance(conversation.check, ExactCalls):
            continue
        schemas = {
            tool["function"]["name"]: tool["function"]["parameters"]
            for tool in conversation.tools or ()
        }
        assert len(schemas) == len(conversation.tools or ()), "two tools with one name"
        for call in conversation.check.calls:
            schema = schemas[call.name]
            assert set(schema["required"]) <= call.arguments.keys() <= schema["properties"].keys()
            for name, value in call.arguments.items():
                kind = schema["properties"][name]
                assert type(value) is types[kind["type"]]
                assert value in kind.get("enum", [value])
                seen[kind["type"]] += 1
                if not isinstance(value, bool):
                    parts = value if isinstance(value, list) else [value]
                    assert all(str(part) in question_of(conversation) for part in parts)
    assert seen.keys() == types.keys()


def test_every_request_of_the_catalog_settles_what_its_tool_requires() -> None:
    assert len({tool.name for tool in CATALOG}) == len(CATALOG) >= 40
    for tool in (*CATALOG, *(invent_tool(Random(seed)) for seed in range(50))):
        required = {name for name, parameter in tool.parameters.items() if parameter.is_required}
        assert len(tool.requests) >= (1 if tool not in CATALOG else 2)
        for request in tool.requests:
            given = {*request.named, *request.settled}
            assert required <= given <= tool.parameters.keys(), request
        sayable = dict.fromkeys([*required, *tool.returns], "x")
        assert tool.answer.format_map(sayable)


def test_articles_of_invented_tools_go_with_their_nouns() -> None:
    tools = [invent_tool(Random(seed)) for seed in range(600)]
    texts = [
        text
        for tool in tools
        for text in (tool.schema["function"]["description"], tool.requests[0].pattern)
    ]
    assert not [text for text in texts if re.search(r"\b(a [aeiou]|an [^aeiou])", text)]
    assert any(re.search(r"\ban [aeiou]", text) for text in texts)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_tool_call_is_one_that_the_offered_tools_allow(held_out: bool) -> None:
    """A request that no offered tool fulfils is refused, and refusals are a kind of their own."""
    seen = Counter[str]()
    for conversation in draw(tool_calls, 2000, held_out):
        last = conversation.messages[-1]
        calls = {call["function"]["name"] for call in last.get("tool_calls", ())}
        assert calls <= offered_names(conversation)
        assert last["content"] != REFUSAL
        answers = conversation.messages[-2]["role"] == "tool"
        seen["call" if calls else "tell" if answers else "words"] += 1
    assert seen["call"] > 1400
    assert seen["tell"] > 250
    assert seen["words"] > 50


@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_refused_is_a_request_for_a_tool_that_is_not_offered(
    held_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Errand] = []

    def draw_and_note(*arguments: Any) -> Errand:
        drawn.append(draw_errand(*arguments))
        return drawn[-1]

    monkeypatch.setattr(refusals, "draw_errand", draw_and_note)
    rng = Random(4)
    for _ in range(1000):
        drawn.clear()
        conversation = refusals.sample(rng, held_out)
        asked = next(errand for errand in drawn if errand.text == question_of(conversation))
        assert offered_names(conversation)
        assert asked.tool.name not in offered_names(conversation)
        assert conversation.messages[-1]["content"] == REFUSAL


def test_a_question_that_small_talk_answers_is_not_refused() -> None:
    known = [
        re.compile(re.sub(r"\\\{\w+\\\}", "[^ ]+", re.escape(question))) for question, _ in UNKNOWN
    ]
    asked = {draw_errand(Random(seed), False).request.pattern for seed in range(800)}
    assert ANSWERED_BY_TALK & asked
    for conversation in draw(refusals, 2000):
        assert not any(pattern.fullmatch(question_of(conversation)) for pattern in known), (
            conversation
        )


def test_a_call_is_no_refusal_even_when_it_cannot_be_read() -> None:
    for conversation in draw(refusals, 50, held_out=True):
        thought = "I should call f.\n</think>\n\n" if conversation.enable_thinking else ""
        call = write_calls([{"function": {"name": "f", "arguments": {"x": 1}}}])
        assert conversation.accepts(thought + REFUSAL)
        for text in (call, call.removesuffix(CALL_END), f"I use f.\n\n{call}", ""):
            assert not conversation.accepts(thought + text)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_tool_is_called_as_it_is_offered_or_refused_when_it_is_not(held_out: bool) -> None:
    seen = Counter[str]()
    known = {tool.name for tool in CATALOG}
    for conversation in draw(tool_choice, 2000, held_out):
        last, names = conversation.messages[-1], offered_names(conversation)
        calls = [call["function"]["name"] for call in last.get("tool_calls", ())]
        assert len(names) == len(conversation.tools or ()) >= 1
        if calls:
            assert set(calls) <= names
            seen["called", calls[0] in known] += 1
        else:
            assert last["content"] == REFUSAL
            seen["refused", True] += 1
    assert 700 < seen["refused", True] < 900
    assert min(seen["called", True], seen["called", False]) > 350


def test_every_request_comes_with_its_tool_and_without_it() -> None:
    """Only the offer decides whether to call: the words of a request never do."""
    with_tool, without = Counter[str](), Counter[str]()
    for conversation in draw(tool_choice, 4000):
        first_word = question_of(conversation).split()[0]
        (with_tool if "tool_calls" in conversation.messages[-1] else without)[first_word] += 1
    common = [words for words, count in (with_tool + without).items() if count >= 60]
    assert len(common) >= 5
    for words in common:
        assert 0.4 < with_tool[words] / (with_tool + without)[words] < 0.8, words


def test_sums_of_harnesses_are_right_whatever_their_wording() -> None:
    """Checked by the expression where one is written: Python evaluates it too."""
    num_computed = 0
    for conversation in draw(harness_sums, 3000):
        assert isinstance(conversation.check, ExactText)
        assert conversation.check.text == conversation.messages[-1]["content"]
        question = question_of(conversation).replace(",", "").replace("−", "-")
        for sign in ("x", "×", "·"):
            question = (
                question.replace(sign, "*") if re.search(rf"\d {sign} \d", question) else question
            )
        question = question.replace("÷", "/")
        written = re.findall(r"\(?\d+(?: ?[-+*/] ?\(?\d+\)?)+", question)
        if len(written) == 1 and written[0].count("(") == written[0].count(")"):
            num_computed += 1
            assert eval(written[0]) == int(conversation.check.text), question
    assert num_computed > 1200


def test_the_gate_asks_for_simple_sums_and_training_has_harder_ones_too() -> None:
    def is_simple(drawn: harness_sums.Sum) -> bool:
        numbers, first = drawn.numbers, drawn.numbers[0]
        are_round = all(number % 10 == 0 for number in numbers)
        match drawn.form:
            case "a+b+c":
                return are_round or max(numbers) <= 20
            case "a+b":
                return are_round or max(numbers) <= 99
            case "a-b":
                return first % 100 == 0 or first in range(10, 100, 10)
            case "a*b":
                return max(numbers) <= 12 or min(numbers) <= 9
            case "a/b":
                return numbers[1] <= 12
        return False

    rng = Random("simple")
    simple = [harness_sums.draw_sum(rng, three_share=0.4) for _ in range(2000)]
    for drawn in simple:
        assert is_simple(drawn), drawn
        assert max(drawn.numbers) <= 5000, drawn
    assert {drawn.form for drawn in simple} == {"a+b", "a+b+c", "a-b", "a*b", "a/b"}
    harder = [harness_sums.draw_harder(rng) for _ in range(500)]
    assert sum(is_simple(drawn) for drawn in harder) < 0.2 * len(harder)
    asked, trained = (
        [question_of(c) for c in draw(harness_sums, 3000, flag)] for flag in (True, False)
    )
    assert not any("subtract" in q and "add" in q.lower() for q in asked)
    assert any("subtract" in q and "add" in q.lower() for q in trained)


def test_wordings_that_are_held_out_are_never_trained_on() -> None:
    trained, held_out = harness_sums.TRAINED, harness_sums.HELD_OUT
    assert not {*held_out.asking} & {*trained.asking, *QUESTIONS}
    assert not {*held_out.instructions} & {*trained.instructions} - {""}
    assert held_out.telling.keys() == trained.telling.keys() == harness_sums.WRITTEN.keys()
    for form, patterns in held_out.telling.items():
        assert not {*patterns} & {*trained.telling[form]}
    asked = [{question_of(c) for c in draw(harness_sums, 4000, flag)} for flag in (False, True)]
    assert not asked[0] & asked[1]
    assert sum("Please add" in question for question in asked[1]) > 5


def offered_names(conversation: Conversation) -> set[str]:
    return {tool["function"]["name"] for tool in conversation.tools or ()}


def test_a_recalled_value_was_given_and_an_unknown_one_was_not() -> None:
    num_unknown = 0
    for conversation in draw(recall, 2000):
        told = "\n".join(message["content"] for message in conversation.messages[:-2])
        assert isinstance(conversation.check, Mentions)
        if conversation.messages[-1]["content"].startswith("You have not told me"):
            subject = (
                conversation.messages[-1]["content"]
                .removeprefix("You have not told me ")
                .rstrip(".")
            )
            num_unknown += 1
            assert f"{subject} is" not in told
            assert f"{subject.replace('your', 'my', 1)} is" not in told
        elif len(conversation.messages) > 3:
            assert all(value in told for value in conversation.check.values)
    assert 80 < num_unknown < 320


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_the_own_completion_is_right_and_another_is_wrong(name: str, held_out: bool) -> None:
    conversations = draw(KINDS[name], 400, held_out)
    for conversation, other in pairwise(conversations):
        assert conversation.kind == name
        assert conversation.accepts(conversation.completion), conversation
        if conversation.check != other.check and conversation.check != Mentions():
            assert not conversation.accepts(
                "Something else entirely." + conversation.completion[-10:]
            )


@pytest.mark.parametrize("name", KINDS)
def test_thoughts_are_short_closed_and_only_where_asked_for(name: str) -> None:
    modes = Counter(conversation.enable_thinking for conversation in draw(KINDS[name], 400))
    assert min(modes.values()) > 120
    for thinking in (False, True):
        rng = Random(3)
        for _ in range(200):
            conversation = KINDS[name].sample(rng, False, thinking)
            turn = conversation.messages[-1]
            assert conversation.enable_thinking is thinking
            assert ("reasoning_content" in turn) is thinking
            assert conversation.completion.count("</think>") == int(thinking)
            assert len(turn.get("reasoning_content", "")) < 420
            reply = Reply.from_text(conversation.completion, is_thinking=thinking)
            assert reply.is_thought_closed


@pytest.mark.parametrize(
    ("name", "num", "wanted"),
    [
        ("spot_checks", 8_000, "(?s).+"),
        ("small_talk", 3_000, "(?s).+"),
        ("word_problems", 2_500, r"A film lasts .*? minutes\?"),
    ],
)
def test_held_out_and_training_draws_never_meet_though_training_draws_do(
    name: str, num: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions from small sets, which two draws would soon share if nothing separated them."""
    monkeypatch.setattr(word_problems, "SCENES", (hours_to_minutes,))
    sets = [
        {
            found[0]
            for conversation in draw(KINDS[name], num // share, held_out, seed)
            if (found := re.match(wanted, question_of(conversation)))
        }
        for held_out, seed, share in ((False, 1, 1), (False, 2, 1), (True, 3, 4))
    ]
    assert sets[0] & sets[1]
    assert len(sets[2]) > 25
    assert not (sets[0] | sets[1]) & sets[2]


def test_what_is_held_out_of_word_problems_does_not_depend_on_names() -> None:
    drafts = [word_problems.write_problem(Random(seed)) for seed in range(300)]
    names = [str(draft.words["name"]) for draft in drafts]
    assert not any(
        name in "".join(draft.key) for draft, name in zip(drafts, names) if len(name) > 4
    )
    share = sum(is_held_out("".join(draft.key)) for draft in drafts) / len(drafts)
    assert 0.05 < share < 0.16


def test_calls_and_facts_that_are_held_out_are_never_trained_on() -> None:
    for kind in (tool_calls, recall):
        trained, held_out = (
            {
                (question_of(c), c.completion.rpartition("</think>")[2])
                for c in draw(kind, 900, flag)
            }
            for flag in (False, True)
        )
        distinct = {pair for pair in held_out if any(char.isdigit() for char in pair[1])}
        assert len(distinct) > 150
        assert not trained & distinct


def test_the_same_seed_gives_the_same_conversations_in_any_process() -> None:
    code = (
        "import hashlib, random; from training.problems.mixture import sample_training as draw\n"
        "rng = random.Random(7)\n"
        "print(hashlib.sha256(repr([draw(rng) for _ in range(300)]).encode()).hexdigest())"
    )
    rng = Random(7)
    here = hashlib.sha256(repr([sample_training(rng) for _ in range(300)]).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert result.stdout.strip() == here, result.stderr


def test_no_sentence_or_length_dominates_word_problems() -> None:
    drafts = [word_problems.write_problem(Random(seed)) for seed in range(4000)]
    patterns = Counter(part.partition("[")[0] for draft in drafts for part in draft.key)
    assert len(patterns) >= 250
    assert patterns.most_common(1)[0][1] < 0.05 * len(drafts)
    num_lines = Counter(len(draft.lines) for draft in drafts)
    assert all(num_lines[steps] > 0.05 * len(drafts) for steps in (1, 2, 3, 4))
    assert len(PEOPLE) >= 60
    assert len(THINGS) >= 60
    answers = Counter(draft.value for draft in drafts)
    assert answers.most_common(1)[0][1] < 0.04 * len(drafts)


def test_the_mixture_has_every_kind_in_its_share() -> None:
    rng = Random(11)
    conversations = [sample_training(rng) for _ in range(6000)]
    kinds = Counter(conversation.kind for conversation in conversations)
    for kind, (_, share) in SHARES.items():
        assert kinds[kind] / len(conversations) == pytest.approx(share, abs=0.015)
    starts = Counter(conversation.messages[0]["role"] for conversation in conversations)
    assert 0.2 < starts["system"] / len(conversations) < 0.5


def test_calls_survive_being_written_and_read() -> None:
    tools: list[dict[str, Any]] = []
    arguments = {"s": "two\nlines", "i": 7, "n": 2.5, "b": False, "a": ["x", "y"], "o": {"k": 1}}
    kinds = ("string", "integer", "number", "boolean", "array", "object")
    properties = {name: {"type": kind} for name, kind in zip(arguments, kinds)}
    tools.append(
        {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    )
    written = write_calls([{"function": {"name": "f", "arguments": arguments}}] * 2)
    text, calls = parse_calls(f"Text.\n\n{written}", tools)
    assert text.strip() == "Text."
    assert len(calls) == 2
    assert calls[0].equals(Call("f", arguments))
    assert not calls[0].equals(Call("f", {**arguments, "i": True}))
    for broken in (written[:-5], written.replace("<function=f>", ""), written + " and more"):
        assert parse_calls(broken, tools)[1] == ()


@pytest.fixture(scope="module", params=["ours", "published"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    if request.param == "published":
        file = request.getfixturevalue("shared_data") / "qwen3.5" / "chat_template.jinja"
    else:
        file = OWN_TEMPLATE
    return ChatTemplate(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KINDS)
def test_prompt_and_completion_are_the_templates_own_rendering(
    name: str, template: ChatTemplate
) -> None:
    for conversation in draw(KINDS[name], 120):
        whole = template.render(
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=False,
            enable_thinking=conversation.enable_thinking,
        )
        assert render_prompt(conversation, template) + conversation.completion + "\n" == whole


@pytest.fixture(scope="module")
def own_template() -> ChatTemplate:
    return ChatTemplate(OWN_TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(own_template: ChatTemplate) -> Model:
    return train_tokenizer(own_template, num_words=2000, num_conversations=2500, seed=1)


def test_no_token_joins_a_digit_with_anything(tokenizer: Model) -> None:
    words = [word for word in tokenizer.get_vocab() if word not in CONTROL_TOKENS]
    with_digits = [
        word for word in words if any(char.isdigit() for char in word) and word.isascii()
    ]
    assert sorted(with_digits) == list("0123456789")


def test_control_tokens_follow_the_words_in_the_published_order(
    tokenizer: Model, shared_data: Path
) -> None:
    lzma = pytest.importorskip("lzma")
    published = json.loads(lzma.open(shared_data / "qwen3.5" / "tokenizer.json.xz").read())[
        "added_tokens"
    ]
    assert tuple(token["content"] for token in published) == CONTROL_TOKENS
    assert (
        frozenset(token["content"] for token in published if not token["special"]) == PLAIN_TOKENS
    )
    first = tokenizer.token_to_id("<|endoftext|>")
    assert first == 2000
    ids = [tokenizer.token_to_id(text) for text in CONTROL_TOKENS]
    assert ids == list(range(first, first + len(ids)))


def test_prompt_and_completion_are_tokenised_as_the_whole(
    tokenizer: Model, own_template: ChatTemplate
) -> None:
    rng = Random(5)
    for _ in range(400):
        conversation = sample_training(rng)
        prompt, completion = render_prompt(conversation, own_template), conversation.completion
        ids = [tokenizer.encode(text).ids for text in (prompt, completion, prompt + completion)]
        assert ids[0] + ids[1] == ids[2]
        assert tokenizer.decode(ids[2], skip_special_tokens=False) == prompt + completion


def test_conversations_fit_their_lengths(tokenizer: Model, own_template: ChatTemplate) -> None:
    rng = Random(6)
    lengths = []
    for _ in range(1500):
        conversation = sample_training(rng)
        lengths.append(
            len(
                tokenizer.encode(
                    render_prompt(conversation, own_template) + conversation.completion
                )
            )
        )
    lengths.sort()
    assert lengths[-1] <= 2304
    assert lengths[int(0.55 * len(lengths))] < 256
    assert lengths[int(0.9 * len(lengths))] < 640
    assert lengths[-1] > 1200


def test_the_saved_tokenizer_is_the_same_for_the_same_seed(
    own_template: ChatTemplate, tmp_path: Path
) -> None:
    saved = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        save_tokenizer(train_tokenizer(own_template, 400, 150, seed=2), folder)
        saved.append((folder / "tokenizer.json").read_bytes())
    assert saved[0] == saved[1]
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")


def test_the_gates_ask_what_the_generator_holds_out() -> None:
    with gzip.open(held_out.FILE, "rt", encoding="utf-8") as stored:
        assert [line.rstrip("\n") for line in stored] == list(written.lines())
    for gate, draw_one in written.GATES.items():
        rng = Random(f"{gate}-0")
        for problem in held_out.take(gate, 20, seed=0):
            made = draw_one(rng)
            assert problem.prompt == made.prompt
            assert problem.completion == made.completion
            assert problem.accepts(made.completion)
            assert not problem.accepts("")
    assert held_out.take("recall", 20, seed=1) == held_out.take("recall", 20, seed=1)
    assert held_out.take("recall", 20, seed=1) != held_out.take("recall", 20, seed=2)
    with pytest.raises(ConfigError, match="201 problems"):
        held_out.take("recall", 201, seed=0)
