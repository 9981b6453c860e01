"""Checks of the chat API, one function each: it returns what it saw, or raises `CheckFailed`.

Each check uses only HTTP, with any model that can answer a small question. The last checks use many
clients: each must be served, and one that disconnects must free its slot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from penstock.eval.probe import (
    QUESTION,
    SUM,
    USAGE,
    CheckFailed,
    NotTested,
    Probe,
    Reply,
    expect,
    field_of,
    read_refusal,
    read_reply,
    show,
)
from penstock.eval.recount import recount_reply

A_DAY_S = 86_400
THINKS = (
    ". The server thinks unless a request turns it off: start Penstock with --no-enable-thinking, "
    "as start_server.sh does"
)
THOUGHT_MARKS = ("<think>", "</think>")
UNLIKELY = ("\u2603\u2603\u2603", "@@##@@", "qqqzzzqqq")  # stop strings that no reply has
LONG_LIMIT = 512
NUM_AT_ONCE = 64
NUM_COMPARED = 3
NUM_LEAVING = 128  # more than slots, so that a slot which is not freed is noticed
LEAVE_AFTER_S = 1.0
LONG_REPLY = 4096
TIMED_TOKENS = 16


def health(probe: Probe) -> str:
    status, _ = probe.read("GET", "/health")
    expect(status == 200, f"HTTP {status} from GET /health", "200")
    return "GET /health answered 200"


def model_list(probe: Probe) -> str:
    status, data = probe.read("GET", "/v1/models")
    expect(status == 200, f"HTTP {status} from GET /v1/models", "200")
    try:
        cards = json.loads(data)["data"]
        names = [card["id"] for card in cards]
    except (ValueError, LookupError, TypeError):
        raise CheckFailed(f"saw {show(data)}; expected data[].id") from None
    expect(bool(names), "no model", "at least one")
    limits = [card.get("max_model_len") for card in cards]
    if isinstance(limits[0], int):
        probe.max_model_len = limits[0]
    return f"it lists {show(', '.join(map(str, names)))}"


def required_fields(probe: Probe) -> str:
    reply = probe.greedy
    name = field_of(reply.fields, "id", str)
    expect(name.startswith("chatcmpl-"), f"id = {name}", "an id that begins with chatcmpl-")
    kind = field_of(reply.fields, "object", str)
    expect(kind == "chat.completion", f"object = {kind}", "chat.completion")
    created = field_of(reply.fields, "created", int)
    expect(
        abs(time.time() - created) < A_DAY_S,
        f"created = {created}",
        "seconds since 1970, about now",
    )
    field_of(reply.fields, "model", str)
    index = field_of(reply.choice, "index", int)
    expect(index == 0, f"choices[0].index = {index}", "0")
    role = field_of(reply.choice["message"], "role", str)
    expect(role == "assistant", f"role = {role}", "assistant")
    expect_content(reply)
    expect(bool(reply.content), "an empty content", "some text")
    expect(reply.finish_reason in ("stop", "length"), reply.finish_reason, "stop or length")
    return f"id, object, created, model, choices and usage of {name}"


def usage_adds_up(probe: Probe) -> str:
    reply = probe.greedy
    prompt, completion, total = (reply.usage[name] for name in USAGE)
    expect(prompt > 0, reply.usage, "prompt_tokens above 0")
    expect(total == prompt + completion, reply.usage, f"total_tokens = {prompt + completion}")
    expect_content(reply)
    num_bytes = len(reply.content.encode())
    expect(
        1 <= completion <= num_bytes + 1,
        f"completion_tokens = {completion} for {num_bytes} bytes of text",
        "at least one byte per token, and one token for the end",
    )
    return f"{prompt} + {completion} = {total}"


def usage_grows(probe: Probe) -> str:
    """A count that does not grow with the prompt is made up."""
    short, long = (probe.ask(QUESTION + " please" * times, max_tokens=1) for times in (0, 40))
    growth = long.usage["prompt_tokens"] - short.usage["prompt_tokens"]
    expect(30 <= growth <= 300, f"{growth} more prompt tokens for 40 more words", "about 40")
    return f"40 more words are {growth} more prompt tokens"


def length_limit(probe: Probe) -> str:
    for limit in (1, 5):
        reply = probe.ask(QUESTION, max_tokens=limit)
        count = reply.usage["completion_tokens"]
        expect(count == limit, f"{count} tokens with max_tokens = {limit}", f"{limit}")
        expect(reply.finish_reason == "length", f"finish_reason = {reply.finish_reason}", "length")
    return 'max_tokens = 1 and 5 gave 1 and 5 tokens and "length"'


def natural_end(probe: Probe) -> str:
    reply = probe.ask(SUM, max_tokens=LONG_LIMIT)
    count = reply.usage["completion_tokens"]
    expect(
        reply.finish_reason == "stop" and count < LONG_LIMIT,
        f"finish_reason = {reply.finish_reason} after {count} tokens for {SUM!r}",
        "a reply that ends by itself, with stop",
    )
    return f'"stop" after {count} tokens'


def _cut(reply: Reply) -> tuple[str, str]:
    """A piece of the reply's text, and the text before it."""
    text = reply.content
    if len(text) < 6:
        raise NotTested(f"the reply is only {text!r}")
    piece = text[len(text) // 2 :][:3]
    return piece, text[: text.index(piece)]


def _expect_stopped(reply: Reply, whole: Reply, piece: str, before: str) -> None:
    expect(
        piece not in reply.content,
        f"{piece!r} in the reply",
        f"an end before the stop string {piece!r}",
    )
    expect(reply.content.strip() == before.strip(), reply.content, repr(before))
    expect(reply.finish_reason == "stop", f"finish_reason = {reply.finish_reason}", "stop")
    count, most = reply.usage["completion_tokens"], whole.usage["completion_tokens"]
    expect(count <= most, f"{count} tokens, {most} without a stop string", "no more than those")


def stop_string(probe: Probe) -> str:
    whole = probe.greedy
    piece, before = _cut(whole)
    for stop in (piece, [piece]):
        _expect_stopped(probe.ask(QUESTION, stop=stop), whole, piece, before)
    return f"ended before {piece!r}, as a string and as a list"


def four_stop_strings(probe: Probe) -> str:
    whole = probe.greedy
    piece, before = _cut(whole)
    _expect_stopped(probe.ask(QUESTION, stop=[*UNLIKELY, piece]), whole, piece, before)
    unstopped = probe.ask(QUESTION, stop=[*UNLIKELY, UNLIKELY[0][:2]])
    expect(
        unstopped.content == whole.content, unstopped.content, f"{show(whole.content)}, unstopped"
    )
    return f"the fourth of four, {piece!r}, ended the reply; four that never occur changed nothing"


def greedy_is_repeatable(probe: Probe) -> str:
    again = probe.ask(QUESTION).content
    expect(
        again == probe.greedy.content, again, f"{show(probe.greedy.content)} again at temperature 0"
    )
    return "the same text twice at temperature 0"


def greedy_by_default(probe: Probe) -> str:
    greedy = probe.greedy.content
    for _ in range(2):
        plain = probe.ask(QUESTION, temperature=None).content
        expect(plain == greedy, plain, f"{show(greedy)}, as at temperature 0")
    return "without a temperature, the reply is that of temperature 0"


def seed(probe: Probe) -> str:
    texts = [probe.ask(QUESTION, temperature=1.0, top_p=1.0, seed=1234).content for _ in range(2)]
    expect(texts[1] == texts[0], texts[1], f"{show(texts[0])} again with the same seed")
    return "the same text twice at temperature 1 with the same seed"


def several_choices(probe: Probe) -> str:
    (answer,) = probe.send(probe.body(QUESTION, n=2, temperature=1.0))
    if 400 <= answer.status < 500:
        status, words = read_refusal(answer)
        return f"n = 2 is refused, which is allowed: HTTP {status}, {words}"
    choices = field_of(read_reply(answer).fields, "choices", list)
    indexes = sorted(field_of(choice, "index", int) for choice in choices)
    expect(indexes == [0, 1], f"choices with the indexes {indexes}", "n = 2 to give 0 and 1")
    return "n = 2 gave the indexes 0 and 1"


def lm_eval_request(probe: Probe) -> str:
    """The fields that lm-evaluation-harness sends, and `index`, by which it sorts choices."""
    fields = {"stop": ["Q:", "</s>", "<|im_end|>"], "seed": 1234, "top_p": 1.0, "max_tokens": 64}
    reply = probe.ask(f"Q: {QUESTION}\nA:", **fields)
    expect("Q:" not in reply.content, reply.content, "an end before Q:")
    index = field_of(reply.choice, "index", int)
    return f"stop, seed and top_p were accepted, choices[0].index = {index}"


def any_model_name(probe: Probe) -> str:
    reply = probe.ask(SUM, model="a-model-that-does-not-exist")
    return f"a model that does not exist was answered by {show(reply.fields.get('model'))}"


def _choices(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk.get("choices") or ()]


def stream_is_the_same(probe: Probe) -> str:
    whole, chunks = probe.greedy, probe.stream(QUESTION)
    choices = _choices(chunks)
    text = "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)
    expect(text == whole.content, text, f"{show(whole.content)}, as without stream")
    given = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    expect(given == [whole.finish_reason], f"finish_reason {given}", f"{whole.finish_reason}, once")
    return f"{len(chunks)} chunks have the text of the whole reply, {given[0]} and [DONE]"


def stream_chunks(probe: Probe) -> str:
    chunks = probe.stream(QUESTION)
    kinds = {field_of(chunk, "object", str) for chunk in chunks}
    expect(kinds == {"chat.completion.chunk"}, f"object = {sorted(kinds)}", "chat.completion.chunk")
    names = {field_of(chunk, "id", str) for chunk in chunks}
    expect(len(names) == 1, f"{len(names)} ids in one stream", "one")
    first = field_of(chunks[0], "choices", list)
    roles = [choice.get("delta", {}).get("role") for choice in first]
    expect(roles == ["assistant"], f"role {roles} in the first chunk", "assistant")
    indexes = {choice.get("index") for choice in _choices(chunks)}
    expect(indexes == {0}, f"indexes {sorted(map(str, indexes))}", "0 in every choice")
    return "object, id, role and index of every chunk"


def stream_usage(probe: Probe) -> str:
    whole = probe.greedy
    chunks = probe.stream(QUESTION, stream_options={"include_usage": True})
    expect(bool(chunks), "no chunk", "some")
    last = chunks[-1]
    expect(
        last.get("choices") == [], f"choices = {show(last.get('choices'))} in the last chunk", "[]"
    )
    usage = Reply(last).usage
    expect(usage == whole.usage, usage, f"{show(whole.usage)}, as without stream")
    return f"the last chunk has the usage of the whole reply, {show(usage)}"


def _expect_no_thought(reply: Reply, hint: str = "") -> None:
    found = [mark for mark in THOUGHT_MARKS if mark in reply.content]
    expect(not found, reply.content, f"no {' and '.join(found)}{hint}")
    expect(not reply.thought, f"a thought: {show(reply.thought)}", f"no thought{hint}")


def expect_content(reply: Reply) -> None:
    """A reply that is only reasoning counts as empty wherever content is counted."""
    if reply.thought and not reply.content:
        raise CheckFailed(
            f"saw an empty content and only a thought: {show(reply.thought)}; expected text{THINKS}"
        )


def no_thinking(probe: Probe) -> str:
    reply = probe.ask(QUESTION, max_tokens=128)
    expect_content(reply)
    _expect_no_thought(reply, THINKS)
    return "no <think> in a plain reply"


def thinking_off(probe: Probe) -> str:
    reply = probe.ask(QUESTION, max_tokens=128, chat_template_kwargs={"enable_thinking": False})
    _expect_no_thought(reply)
    return "no <think> with enable_thinking: false"


def prompt_recount(probe: Probe) -> str:
    if probe.counter is None or not probe.counter.has_template:
        raise NotTested("needs --tokenizer FOLDER with tokenizer.json and a chat template")
    conversations: list[list[dict[str, str]]] = [
        [{"role": "user", "content": QUESTION}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Zürich, 你好 🚀 x²\n\n1,000"},
        ],
        [
            {"role": "user", "content": SUM},
            {"role": "assistant", "content": "56"},
            {"role": "user", "content": "And 8 * 9?"},
        ],
    ]
    counts = []
    for messages in conversations:
        claimed = probe.ask("", messages=messages, max_tokens=1).usage["prompt_tokens"]
        counted = probe.counter.count_prompt(messages)
        expect(claimed == counted, f"prompt_tokens = {claimed}", f"{counted}, counted again")
        counts.append(str(counted))
    return f"prompts of {', '.join(counts)} tokens, counted again"


def completion_recount(probe: Probe) -> str:
    if probe.counter is None:
        raise NotTested("needs --tokenizer FOLDER with tokenizer.json")
    seen = []
    for content, limit in ((QUESTION, 24), (QUESTION, 128), (SUM, LONG_LIMIT)):
        reply = probe.ask(content, max_tokens=limit)
        expect_content(reply)
        claimed = reply.usage["completion_tokens"]
        count = recount_reply(probe.counter, reply.content, claimed, reply.finish_reason)
        hint = THINKS if reply.thought else ""  # usage counts the thought, content omits it
        expect(
            not count.is_off,
            f"completion_tokens = {claimed}",
            f"{count.counted}, counted again{hint}",
        )
        seen.append(f"{claimed}/{count.counted}")
    return f"completions claimed/counted again: {', '.join(seen)}"


FAULTY: dict[str, Any] = {
    "a body that is not JSON": b'{"model": "x", "messages": [',
    "no messages": {"messages": None},
    "messages that are not a list": {"messages": "hello"},
    "a message without a role": {"messages": [{"content": "hello"}]},
    "max_tokens = -1": {"max_tokens": -1},
    'temperature = "hot"': {"temperature": "hot"},
    "temperature = -1": {"temperature": -1},
    "stop = 5": {"stop": 5},
}


def refusals(probe: Probe) -> str:
    bodies = [
        fault if isinstance(fault, bytes) else probe.body(SUM, **fault) for fault in FAULTY.values()
    ]
    statuses, broken = set(), []
    for name, body in zip(FAULTY, bodies):
        (answer,) = probe.send(body)
        try:
            statuses.add(read_refusal(answer)[0])
        except CheckFailed as failure:
            broken.append(f"{name}: {failure}")
    if broken:
        raise CheckFailed("; ".join(broken))
    return (
        f"{len(FAULTY)} faulty requests were refused with {', '.join(map(str, sorted(statuses)))}"
    )


def too_long(probe: Probe) -> str:
    if probe.max_model_len is None:
        raise NotTested("the list of models has no max_model_len")
    (answer,) = probe.send(probe.body("word " * (probe.max_model_len + 1), max_tokens=1))
    status, words = read_refusal(answer)
    return f"a prompt of more than {probe.max_model_len:,} tokens: HTTP {status}, {words}"


def unknown_path(probe: Probe) -> str:
    status, _ = probe.read("POST", "/v1/no-such-endpoint", {"model": probe.model})
    expect(status in (404, 405), f"HTTP {status} for an unknown path", "404")
    return f"an unknown path is {status}"


def many_at_once(probe: Probe) -> str:
    """All must be answered, and none with another's answer: a few are first sent alone."""
    questions = [
        f"What is {11 + number} + {number % 7 + 2}? Reply with just the number."
        for number in range(NUM_AT_ONCE)
    ]
    alone = [probe.ask(question, max_tokens=16).content for question in questions[:NUM_COMPARED]]
    start_s = time.monotonic()
    answers = probe.send(*(probe.body(question, max_tokens=16) for question in questions))
    wall_s = time.monotonic() - start_s
    texts, faults = [], []
    for answer in answers:
        try:
            texts.append(read_reply(answer).content)
        except CheckFailed as failure:
            faults.append(str(failure))
    if faults:
        raise CheckFailed(
            f"{len(faults)} of {NUM_AT_ONCE} requests at once failed; the first {faults[0]}"
        )
    mixed_up = [(one, other) for one, other in zip(alone, texts) if one != other]
    if mixed_up:
        expect(
            len(mixed_up) < 2,  # one may be a near tie that rounds differently in another batch
            f"{show(mixed_up[0][1])} among {NUM_AT_ONCE} requests at once",
            f"{show(mixed_up[0][0])}, as when sent alone",
        )
    return f"{NUM_AT_ONCE} requests at once were answered in {wall_s:.2f} s"


def leaving_frees_the_place(probe: Probe) -> str:
    """After clients with long replies disconnect, a new one must soon be served as if idle."""
    idle_s = min(_seconds_of_a_reply(probe) for _ in range(3))
    longest = min(LONG_REPLY, (probe.max_model_len or LONG_REPLY) // 2)
    (tried,) = probe.send(probe.body(QUESTION, max_tokens=1, ignore_eos=True))
    goes_on = True if tried.status == 200 else None  # not every server can ignore an end token
    body = probe.body(QUESTION, max_tokens=longest, ignore_eos=goes_on, stream=True)
    left = probe.send(*[body] * NUM_LEAVING, timeout_s=LEAVE_AFTER_S)
    for status in {answer.status for answer in left}:
        expect(status in (0, 200, 429, 503), f"HTTP {status} for a stream", "200, or 429 when full")
    deadline_s = time.monotonic() + _patience_s([len(answer.pieces) for answer in left], longest)
    enough_s = max(2 * idle_s, idle_s + 0.25)
    took_s = _seconds_of_a_reply(probe)
    while took_s > enough_s and time.monotonic() < deadline_s:
        time.sleep(0.1)
        took_s = _seconds_of_a_reply(probe)
    expect(
        took_s <= enough_s,
        f"{took_s:.2f} s for a short reply after {NUM_LEAVING} clients disconnected",
        f"about {idle_s:.2f} s as before: their slots are not freed",
    )
    return (
        f"after {NUM_LEAVING} clients disconnected, a reply took {took_s:.2f} s, {idle_s:.2f} s "
        "before"
    )


def _seconds_of_a_reply(probe: Probe) -> float:
    start_s = time.monotonic()
    probe.ask(QUESTION, max_tokens=TIMED_TOKENS)
    return time.monotonic() - start_s


def _patience_s(pieces: list[int], longest: int) -> float:
    """Less time than the abandoned replies would take, or the wait would prove nothing."""
    rate = max(1.0, sum(pieces) / max(1, sum(count > 0 for count in pieces)) / LEAVE_AFTER_S)
    return min(10.0, max(1.0, longest / rate / 2))
