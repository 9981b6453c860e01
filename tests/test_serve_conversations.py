"""State of the Responses API: references, conversations, background runs."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import openai
import pytest

from response_events import assert_well_formed, parse_events
from serving import Server, assert_refused, eventually

QUESTION = "What is 17 + 26? Reply with just the number."
FEED = "Give 225 grams of food to Lena."
FEED_PET: Any = {
    "type": "function",
    "name": "feed_pet",
    "description": "Release food for a pet.",
    "parameters": {
        "type": "object",
        "properties": {"pet": {"type": "string"}, "grams": {"type": "integer"}},
        "required": ["pet", "grams"],
    },
}
LONG: Any = {"input": "Tell me about rivers.", "background": True}


def respond(api: openai.OpenAI, input: Any = openai.omit, **fields: Any) -> Any:
    return api.responses.create(model="any", input=input, **fields)


def ids(items: Any) -> list[str]:
    return [item.id for item in items]


# References


def test_a_reference_is_the_item_it_names(api: openai.OpenAI) -> None:
    """As Vercel's AI SDK sends them: the model's output by its id, results as they are."""
    first = respond(api, FEED, tools=[FEED_PET], reasoning={"effort": "high"})
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}
    user = {"role": "user", "content": FEED}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = respond(api, [user, *references, result], tools=[FEED_PET])
    whole = respond(api, [user, *first.output, result], tools=[FEED_PET])
    assert by_reference.usage.input_tokens == whole.usage.input_tokens
    assert by_reference.output_text == whole.output_text
    api.responses.delete(first.id)  # a later response has the items too
    again = respond(api, [user, *references, result], tools=[FEED_PET])
    assert again.output_text == whole.output_text
    forgotten = respond(api, QUESTION, store=False)
    with pytest.raises(openai.NotFoundError, match="not found"):
        respond(api, [{"type": "item_reference", "id": forgotten.output[0].id}, user])


def test_input_items_are_listed_a_page_at_a_time(api: openai.OpenAI) -> None:
    first = respond(
        api, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    second = respond(api, QUESTION, previous_response_id=first.id)
    listed = api.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in listed.data] == ["developer", "user", "assistant", "user"]
    assert listed.data[2].id == first.output[0].id
    assert [listed.data[at].content[0].type for at in (1, 2)] == ["input_text", "output_text"]
    latest_first = list(api.responses.input_items.list(second.id, limit=3))  # over two pages
    assert ids(latest_first) == ids(reversed(listed.data))
    (last,) = api.responses.input_items.list(second.id, order="asc", after=listed.data[2].id).data
    assert last.content[0].text == QUESTION
    for query in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "msg_x"}):
        with pytest.raises(openai.BadRequestError):
            api.responses.input_items.list(second.id, **query)  # type: ignore[arg-type]


# Stateless clients


def test_a_sealed_thought_is_the_thought_when_it_is_sent_back(api: openai.OpenAI) -> None:
    """As Codex and the AI SDK do with store: false."""
    asked: dict[str, Any] = {"tools": [FEED_PET], "store": False, "reasoning": {"effort": "high"}}
    first = respond(api, FEED, include=["reasoning.encrypted_content"], **asked)
    thought, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}
    user, said = {"role": "user", "content": FEED}, call.to_dict()
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    open_ = {"type": "reasoning", "summary": [], "content": [thought.content[0].to_dict()]}
    tokens = [
        respond(api, [user, *items, said, result], max_output_tokens=1, **asked).usage.input_tokens
        for items in ([sealed], [open_], [])
    ]
    assert tokens[0] == tokens[1] > tokens[2]
    with api.responses.stream(
        model="any", input=QUESTION, reasoning={"effort": "high", "summary": "auto"}
    ) as stream:
        deltas = [
            event.delta for event in stream if event.type == "response.reasoning_summary_text.delta"
        ]
        (thought, _) = stream.get_final_response().output
    assert thought.type == "reasoning"
    assert thought.summary[0].text == "".join(deltas) != ""


def test_log_probabilities_are_beside_the_text(server: Server, api: openai.OpenAI) -> None:
    reply = respond(api, QUESTION, top_logprobs=2, reasoning={"effort": "high"})
    message = reply.output[-1].content[0]
    assert message.text == "".join(token.token for token in message.logprobs) == "43"
    assert [len(token.top_logprobs) for token in message.logprobs] == [2] * len(message.logprobs)
    body = {
        "input": QUESTION,
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "high"},
        "stream": True,
    }
    events = parse_events(server.post(body, "/v1/responses").content)
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    tokens = list(itertools.chain.from_iterable(told))
    assert [token["token"] for token in tokens] == [token.token for token in message.logprobs]
    assert events[-1]["response"]["output"][-1]["content"][0]["logprobs"] == tokens
    assert tokens[0]["top_logprobs"] == []


# Custom tools


def test_a_custom_tool_is_called_with_text_of_its_grammar(
    server: Server, api: openai.OpenAI
) -> None:
    code: Any = {
        "type": "custom",
        "name": "enter_code",
        "description": "Enters a code.",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[A-Z]{3}-[0-9]{4}"},
    }
    choice: Any = {"type": "custom", "name": "enter_code"}
    first = respond(api, "Enter the code.", tools=[code, FEED_PET], tool_choice=choice)
    (call,) = [item for item in first.output if item.type == "custom_tool_call"]
    letters, digits = call.input.split("-")
    assert (len(letters), len(digits), letters.isupper(), digits.isdigit()) == (3, 4, True, True)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Wrong."}
    second = respond(api, [output], previous_response_id=first.id, tools=[code, FEED_PET])
    assert second.usage.input_tokens > first.usage.input_tokens
    lark = 'start: verb " " NUMBER\nverb: "add" | "take"\nNUMBER: /[0-9]{2}/'
    stock = {
        **code,
        "name": "stock",
        "format": {"type": "grammar", "syntax": "lark", "definition": lark},
    }
    body = {"input": "Add 12 pieces.", "tools": [stock], "tool_choice": "required", "stream": True}
    events = parse_events(server.post(body, "/v1/responses").content)
    output_items = events[-1]["response"]["output"]
    assert_well_formed(events, output_items)
    verb, number = output_items[0]["input"].split(" ")
    assert verb in ("add", "take")
    assert len(number) == 2
    assert any(event["type"] == "response.custom_tool_call_input.delta" for event in events)
    free = respond(api, FEED, tools=[code, FEED_PET])  # beside a tool with a grammar
    assert [item.type for item in free.output] == ["function_call"]
    assert json.loads(free.output[0].arguments) == {"pet": "Lena", "grams": 225}
    assert respond(api, QUESTION, tools=[code]).output_text == "43"


# Without a reply


def test_input_tokens_are_those_of_the_reply(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"input": FEED, "instructions": "Be kind.", "tools": [FEED_PET]}
    counted = api.responses.input_tokens.count(model="any", **asked)
    assert counted.input_tokens == respond(api, max_output_tokens=1, **asked).usage.input_tokens
    assert counted.object == "response.input_tokens"
    first = respond(api, QUESTION)
    after = api.responses.input_tokens.count(
        model="any", previous_response_id=first.id, input="Why?"
    )
    assert after.input_tokens > first.usage.total_tokens


def test_a_conversation_that_was_compacted_goes_on(api: openai.OpenAI) -> None:
    first = respond(api, [{"role": "user", "content": "My name is Alice."}])
    compacted = api.responses.compact(
        model="any", previous_response_id=first.id, input=[{"role": "user", "content": QUESTION}]
    )
    assert compacted.object == "response.compaction"
    *messages, compaction = compacted.output
    assert [message.content[0].text for message in messages] == ["My name is Alice.", QUESTION]
    assert compaction.type == "compaction"
    assert compacted.usage.output_tokens > 0
    after = [
        *(item.to_dict(warnings=False) for item in compacted.output),
        {"role": "user", "content": "Why?"},
    ]
    assert respond(api, after, max_output_tokens=1).usage.input_tokens > 20


def test_of_nothing_there_is_no_summary(server: Server) -> None:
    for asked in ({}, {"input": None}, {"instructions": "Be brief."}):
        assert_refused(server.post(asked, "/v1/responses/compact"), 400, "input")


def test_truncation_drops_the_oldest_turns_and_nothing_else(api: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(40):
        turns += [
            {"role": "user", "content": f"{number} " + "word " * 120},
            {"role": "assistant", "content": "Yes."},
        ]
    question = {"role": "user", "content": QUESTION}
    with pytest.raises(openai.BadRequestError, match="context"):
        respond(api, [*turns, question])
    cut = respond(api, [*turns, question], truncation="auto", max_output_tokens=3000)
    assert cut.truncation == "auto"
    assert 4096 - 3000 - 200 < cut.usage.input_tokens <= 4096 - 3000


# Conversations


def test_responses_go_on_from_a_conversation_and_add_to_it(api: openai.OpenAI) -> None:
    talk = api.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Alice."}],
        metadata={"of": "Alice"},
    )
    assert talk.object == "conversation"
    first = respond(api, "What is my name?", conversation=talk.id)
    assert first.conversation.id == talk.id
    second = respond(api, QUESTION, conversation={"id": talk.id}, store=False)
    assert second.usage.input_tokens > first.usage.total_tokens
    listed = api.conversations.items.list(talk.id, order="asc").data
    assert [item.role for item in listed] == ["user", "user", "assistant", "user", "assistant"]
    assert [listed[2].id, listed[4].id] == [first.output[0].id, second.output[0].id]
    item = api.conversations.items.retrieve(listed[0].id, conversation_id=talk.id)
    assert item.content[0].text == "My name is Alice."
    added = api.conversations.items.create(talk.id, items=[{"role": "user", "content": "Wait."}])
    assert [one.content[0].text for one in added.data] == ["Wait."]
    assert api.conversations.items.delete(listed[0].id, conversation_id=talk.id).id == talk.id
    assert ids(api.conversations.items.list(talk.id, limit=2)) == [
        added.data[0].id,
        *ids(reversed(listed[1:])),
    ]
    with pytest.raises(openai.NotFoundError):
        api.conversations.items.retrieve(listed[0].id, conversation_id=talk.id)
    assert api.conversations.update(talk.id, metadata={"of": "Bob"}).metadata == {"of": "Bob"}
    assert api.conversations.retrieve(talk.id).metadata == {"of": "Bob"}
    third = respond(api, conversation=talk.id, max_output_tokens=4)  # a reply to what was added
    assert third.usage.input_tokens > 20
    assert api.conversations.delete(talk.id).deleted
    for attempt in (
        api.conversations.retrieve,
        api.conversations.delete,
        api.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            attempt(talk.id)
    assert api.responses.retrieve(first.id).output_text == first.output_text


def test_what_a_conversation_cannot_hold_is_refused(server: Server) -> None:
    lone = {"items": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}
    assert_refused(server.post(lone, "/v1/conversations"), 400, "items[0].call_id")
    assert_refused(server.post({"items": 5}, "/v1/conversations"), 400, "items")
    assert_refused(
        server.post({"metadata": {"a": "x" * 513}}, "/v1/conversations"), 400, "metadata"
    )
    id = server.post({}, "/v1/conversations").json()["id"]
    path = f"/v1/conversations/{id}/items"
    assert_refused(server.post({"items": []}, path), 400, "items")
    assert_refused(
        server.post({"items": [{"type": "item_reference", "id": "x"}]}, path), 404, "items"
    )
    assert_refused(server.http.get(f"{server.url}{path}/msg_x"), 404, None)
    assert_refused(server.http.get(f"{server.url}/v1/responses/{id}"), 404, None)
    empty = server.http.get(f"{server.url}{path}").json()
    assert (empty["data"], empty["has_more"]) == ([], False)
    assert_refused(server.post({"conversation": id}, "/v1/responses"), 400, "input")


def test_a_change_of_metadata_says_what_it_is_and_changes_nothing_else(server: Server) -> None:
    id = server.post({"metadata": {"of": "Alice"}}, "/v1/conversations").json()["id"]
    path = f"/v1/conversations/{id}"
    assert_refused(server.post({}, path), 400, "metadata")
    items = [{"role": "user", "content": "Hello"}]
    assert_refused(server.post({"metadata": {}, "items": items}, path), 400, "items")
    assert server.http.get(f"{server.url}{path}").json()["metadata"] == {"of": "Alice"}
    assert server.post({"metadata": None}, path).json()["metadata"] == {}


def test_a_result_whose_call_was_deleted_is_named_by_its_id(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "43"}
    id = server.post({"items": [call, result]}, "/v1/conversations").json()["id"]
    path = f"{server.url}/v1/conversations/{id}/items"
    stored_result, stored_call = server.http.get(path).json()["data"]
    assert server.http.delete(f"{path}/{stored_call['id']}").status_code == 200
    asked = {"conversation": id, "input": "Go on."}
    refused = server.post(asked, "/v1/responses")
    assert refused.status_code == 400
    assert f"The stored item {stored_result['id']} has no" in refused.json()["error"]["message"]
    assert server.http.delete(f"{path}/{stored_result['id']}").status_code == 200
    assert server.post({**asked, "max_output_tokens": 1}, "/v1/responses").status_code == 200


# In the background


def wait_for(api: openai.OpenAI, id: str) -> Any:
    seen = []
    while (response := api.responses.retrieve(id)).status in ("queued", "in_progress"):
        seen.append(response.status)
        time.sleep(0.02)
    assert seen == sorted(seen, reverse=True)  # never queued again
    return response


def test_a_background_response_is_fetched_when_it_is_done(api: openai.OpenAI) -> None:
    begun = respond(api, QUESTION, background=True)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    done = wait_for(api, begun.id)
    assert (done.status, done.output_text) == ("completed", "43")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a completed response"):
        api.responses.cancel(begun.id)
    assert respond(api, "Why?", previous_response_id=begun.id, max_output_tokens=1).id
    cut = wait_for(api, respond(api, background=True, input=LONG["input"], max_output_tokens=5).id)
    assert cut.status == "incomplete"


def test_a_background_response_is_cancelled_or_deleted(server: Server, api: openai.OpenAI) -> None:
    endless: Any = {"extra_body": {"ignore_eos": True}, **LONG}
    begun = respond(api, **endless)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        respond(api, "Why?", previous_response_id=begun.id)
    assert eventually(lambda: api.responses.retrieve(begun.id).output_text != "")
    cancelled = api.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert api.responses.cancel(begun.id) == api.responses.retrieve(begun.id) == cancelled
    deleted = respond(api, **endless)
    api.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(deleted.id)
    late = wait_for(
        api, respond(api, **(endless | {"extra_body": {"ignore_eos": True, "timeout": 0.3}})).id
    )
    assert (late.status, late.error.code) == ("failed", "server_error")
    assert eventually(lambda: server.stats()["num_running"] == 0)


def test_a_stream_that_was_left_goes_on_and_is_read_again(
    server: Server, api: openai.OpenAI
) -> None:
    body = {"input": LONG["input"], "max_output_tokens": 60, "background": True, "stream": True}
    with server.http.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    path = f"{server.url}/v1/responses/{id}?stream=true"
    events = parse_events(server.http.get(path).content)  # from the start to the end, while it runs
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert_well_formed([events[0], *events[2:]], events[-1]["response"]["output"])
    assert events[-1]["response"] == server.http.get(f"{server.url}/v1/responses/{id}").json()
    with api.responses.retrieve(id, stream=True, starting_after=9) as rest:
        assert [event.sequence_number for event in rest] == list(range(10, len(events)))
    assert_refused(server.http.get(f"{path}&starting_after=x"), 400, "starting_after")
    assert server.http.get(f"{path}&starting_after={len(events)}").content == b""
