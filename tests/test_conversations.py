"""Invariants of sessions: what continues, what is replaced, and the report of ended sessions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import RequestError
from penstock.serve import conversations as module
from penstock.serve.conversations import Conversations, Message, Status
from penstock.serve.requests import ChatRequest
from penstock.serve.sessions import ReplyNote
from penstock.serve.text_stream import ReplyDelta
from penstock.text.dialects import ContentDelta, ReplyEnd
from penstock.types import SamplingParams

KEY = ("ann", "chat")
ALICE = {"role": "user", "content": "My name is Alice."}
HELLO = {"role": "assistant", "content": "Hello, Alice."}
ASK = {"role": "user", "content": "What is my name?"}
TELL = {"role": "assistant", "content": "Alice."}
TERSE = {"role": "system", "content": "Be terse."}
KIND = {"role": "system", "content": "Be kind."}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def say(
    kept: Conversations, sent: list[Message], reply: Message = TELL, key: tuple[str, str] = KEY
) -> tuple[Status, list[Message]]:
    """One turn: how it matched its session, and its prompt."""
    turn, _, messages = kept.begin(key, sent)
    kept.end(turn, reply, 7)
    return turn.status, messages


def begun(**options: Any) -> Conversations:
    kept = Conversations(**options)
    assert say(kept, [ALICE], HELLO) == ("new", [ALICE])
    return kept


def test_new_messages_come_after_what_is_held() -> None:
    kept = begun()
    assert say(kept, [ASK]) == ("continued", [ALICE, HELLO, ASK])
    assert say(kept, [ALICE | {"content": "And yours?"}, ASK])[1][:4] == [ALICE, HELLO, ASK, TELL]
    assert kept.describe("ann")[0].num_messages == 7


@pytest.mark.parametrize(
    "history",
    [
        [ALICE, HELLO, ASK],
        [ALICE, HELLO | {"content": "Hi!"}, ASK],
        [ALICE | {"content": "I am Bob."}, HELLO, ASK],
        [ASK, TELL, ASK],
        [ALICE],
        [TERSE, ALICE],
        [ALICE, ASK],
    ],
    ids=[
        "the same",
        "edited reply",
        "edited question",
        "shortened",
        "asked again",
        "with system",
        "joined",
    ],
)
def test_a_whole_history_is_taken_as_it_is_and_replaces_what_is_held(
    history: list[Message],
) -> None:
    kept = begun()
    assert say(kept, history) == ("history", history)
    system = [message for message in history if message["role"] == "system"]
    said = history[len(system) :]
    assert say(kept, [ASK | {"content": "Why?"}])[1][:-1] == [*system, *said, TELL]


def test_a_system_prompt_stays_until_another_is_sent() -> None:
    kept = Conversations()
    say(kept, [TERSE, ALICE], HELLO)
    assert say(kept, [ASK])[1] == [TERSE, ALICE, HELLO, ASK]
    assert say(kept, [KIND, ASK])[1] == [KIND, ALICE, HELLO, ASK, TELL, ASK]
    assert say(kept, [ASK])[1][0] == KIND
    assert say(kept, [ALICE], HELLO) == ("history", [ALICE])
    assert say(kept, [ASK])[1] == [ALICE, HELLO, ASK]


def test_a_result_goes_on_from_its_call_and_knows_its_name() -> None:
    kept = Conversations()
    function = {"name": "feed", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": function}]}
    say(kept, [ALICE], call)
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert kept.names_of_calls(KEY) == {"c1": "feed"}
    assert say(kept, [result]) == ("continued", [ALICE, call, result | {"name": "feed"}])
    assert say(kept, [ASK])[1][2]["name"] == "feed"


def test_a_request_that_begins_with_the_last_reply_goes_on_from_it() -> None:
    kept = begun()
    assert say(kept, [HELLO, ASK]) == ("continued", [ALICE, HELLO, ASK])
    other = HELLO | {"content": "Who?"}
    assert say(kept, [other, ASK]) == ("history", [other, ASK])
    calls = [{"id": "c1", "function": {"name": "feed", "arguments": "{}"}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c1", "name": "feed", "content": "done"}
    for sent, status in (
        (call, "continued"),
        (call | {"tool_calls": [calls[0] | {"id": "c2"}]}, "history"),
    ):
        kept.delete(KEY)
        say(kept, [ALICE], call)
        assert say(kept, [sent, result])[0] == status
    kept.delete(KEY)
    say(kept, [ALICE], call)
    arguments = {
        "id": "c1",
        "function": {"name": "feed", "arguments": {}},
    }  # as another API writes them
    prompt = [ALICE, call, result, ASK]
    assert say(kept, [call | {"tool_calls": [arguments]}, result, ASK]) == ("continued", prompt)
    assert kept.describe("ann")[0].num_messages == 5


def test_a_turn_without_an_end_leaves_the_session_as_it_was() -> None:
    kept = begun()
    kept.begin(KEY, [ASK])
    kept.begin(KEY, [ASK, TELL, ASK])
    assert say(kept, [ASK])[1] == [ALICE, HELLO, ASK]


def test_the_first_of_several_replies_is_held_when_all_have_ended() -> None:
    kept = Conversations()
    turn, _, messages = kept.begin(KEY, [ALICE])
    sampling = SamplingParams(n=2)
    chat = ChatRequest(
        messages=messages,
        tools=None,
        template_arguments={},
        sampling=sampling,
        is_stream=False,
        include_usage=False,
        reply_start="Hello, ",
    )
    note = ReplyNote(kept, turn, chat)
    note.stream = SimpleNamespace(num_context_tokens=9)  # type: ignore[assignment]
    delivered: list[ReplyDelta] = []
    deliver = note.before(delivered.append)
    for index, text in ((1, "Bob."), (0, "Alice"), (0, ".")):
        deliver(ReplyDelta(index, [ContentDelta(text)]))
    deliver(ReplyDelta(0, [ReplyEnd("stop")]))
    assert len(kept) == 0, "the other may fail, and then the whole call has"
    deliver(ReplyDelta(1, [ReplyEnd("length")]))
    assert len(delivered) == 5
    assert kept.describe("ann")[0].num_tokens == 9
    assert say(kept, [ASK])[1] == [ALICE, HELLO, ASK]


def test_turns_at_the_same_time_do_not_see_each_other_and_are_kept_in_the_order_of_their_ends() -> (
    None
):
    kept = begun()
    one, _, prompt_of_one = kept.begin(KEY, [ASK])
    other, _, prompt_of_other = kept.begin(KEY, [ASK | {"content": "Who?"}])
    assert prompt_of_one[:-1] == prompt_of_other[:-1] == [ALICE, HELLO]
    kept.end(other, TELL, 7)
    kept.end(one, TELL, 7)
    assert say(kept, [ASK])[1] == [ALICE, HELLO, ASK | {"content": "Who?"}, TELL, ASK, TELL, ASK]


def test_first_turns_at_the_same_time_are_both_kept() -> None:
    kept = Conversations()
    turns = [kept.begin(KEY, [message])[0] for message in (ALICE, ASK)]
    for turn in turns:
        kept.end(turn, TELL, 7)
    assert say(kept, [KIND])[1] == [KIND, ALICE, TELL, ASK, TELL]


def test_a_deleted_session_begins_anew_says_so_and_is_not_revived_by_a_reply_on_its_way() -> None:
    kept = begun()
    turn, _, _ = kept.begin(KEY, [ASK])
    assert kept.delete(KEY)
    assert not kept.delete(KEY)
    kept.end(turn, TELL, 7)
    assert (len(kept), kept.num_bytes, kept.why_ended(KEY)) == (0, 0, "deleted")
    assert say(kept, [ASK]) == ("deleted", [ASK])
    assert kept.why_ended(KEY) is None
    assert say(kept, [ALICE]) == ("continued", [ASK, TELL, ALICE])


def test_a_session_expires_when_it_was_not_used_for_too_long_and_says_so() -> None:
    clock = Clock()
    kept = begun(max_idle_s=60, clock=clock)
    for _ in range(3):
        clock.now_s += 50
        assert say(kept, [ASK])[0] == "continued"
    clock.now_s += 61
    assert kept.describe("ann") == []
    assert say(kept, [ASK]) == ("expired", [ASK])
    clock.now_s += 61
    assert say(kept, [ASK, TELL, ASK]) == ("history", [ASK, TELL, ASK])


def test_the_tenant_that_holds_most_loses_its_least_recently_used_session() -> None:
    kept = Conversations(max_bytes=1000)
    for number in range(5):
        say(kept, [ALICE], HELLO, ("ann", str(number)))
    say(kept, [ASK], TELL, ("ben", "chat"))
    say(kept, [ASK], TELL, ("ann", "0"))
    say(kept, [ASK | {"content": "x" * 450}], TELL, ("ann", "5"))
    assert kept.num_bytes <= 1000
    assert kept.why_ended(("ann", "1")) == "evicted"
    assert [info.id for info in kept.describe("ben")] == ["chat"]
    assert [info.id for info in kept.describe("ann")][:2] == ["5", "0"]
    assert kept.num_bytes == sum(
        info.num_bytes for one in ("ann", "ben") for info in kept.describe(one)
    )
    assert say(kept, [ASK], TELL, ("ann", "1"))[0] == "evicted"


def test_sessions_and_the_memory_of_ended_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 2)
    kept = Conversations(max_sessions=2)
    for number in range(6):
        say(kept, [ALICE], HELLO, ("ann", str(number)))
    assert [info.id for info in kept.describe("ann")] == ["5", "4"]
    assert [kept.why_ended(("ann", str(number))) for number in range(4)] == [
        None,
        None,
        "evicted",
        "evicted",
    ]


def test_a_session_larger_than_all_may_be_is_not_kept_and_none_is_where_nothing_may_be() -> None:
    kept = Conversations(max_bytes=500)
    say(kept, [ALICE | {"content": "x" * 600}])
    assert (len(kept), kept.num_bytes, kept.why_ended(KEY)) == (0, 0, "evicted")
    nothing = Conversations(max_bytes=0)
    assert [say(nothing, [message]) for message in (ALICE, ASK)] == [
        ("new", [ALICE]),
        ("new", [ASK]),
    ]


def test_a_session_that_has_grown_too_long_is_refused_and_a_shorter_history_heals_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 4)
    kept = begun()
    say(kept, [ASK])
    with pytest.raises(RequestError, match="holds 4 messages") as refused:
        say(kept, [ASK])
    assert refused.value.param == "session_id"
    say(kept, [ALICE, HELLO])
    kept.delete(KEY)
    monkeypatch.undo()
    say(
        kept,
        [
            ALICE,
            HELLO
            | {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": [0] * 2**18}}]},
        ],
    )
    with pytest.raises(RequestError, match="262,144 values"):
        say(kept, [ASK])


def test_tenants_have_sessions_of_their_own() -> None:
    kept = begun()
    assert say(kept, [ASK], TELL, ("ben", "chat")) == ("new", [ASK])
    assert say(kept, [ASK])[1] == [ALICE, HELLO, ASK]
