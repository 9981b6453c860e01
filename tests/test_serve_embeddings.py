"""Embeddings, reranking and scores over HTTP, from a checkpoint in Qwen3-Embedding's layout."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from array import array
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch
import transformers

from pooled_models import save_embedder, vector_of
from serving import Server, assert_refused, start_server

TEXTS = ["one river", "two rivers and a lake", "no", "über <|im_end|> all"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_embedder(folder)


@pytest.fixture(scope="module")
def server(folder: Path, reference: Any) -> Iterator[Server]:
    engine = {"model": str(folder), "max_model_len": 512, "max_step_tokens": 256}
    with start_server(engine, {"max_queue": 64}) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def tokenizer(folder: Path, reference: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def embed(server: Server, **fields: Any) -> list[list[float]]:
    answer = server.post(fields, "/v1/embeddings")
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def close_to(vector: Any) -> Any:
    return pytest.approx([float(value) for value in vector], abs=2e-5)


def cosine(first: Any, second: Any) -> float:
    return float(torch.dot(torch.as_tensor(first), torch.as_tensor(second)))


def test_the_openai_sdk_gets_the_vectors_of_transformers_in_order(
    api: openai.OpenAI, reference: Any, tokenizer: Any
) -> None:
    answer = api.embeddings.create(model="any", input=TEXTS, user="somebody")
    ids = [tokenizer(text).input_ids for text in TEXTS]
    assert all(one[-1] == tokenizer.eos_token_id for one in ids)
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    for one, token_ids in zip(answer.data, ids):
        assert one.embedding == close_to(vector_of(reference, token_ids))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


def test_base64_and_floats_are_the_same_numbers(server: Server) -> None:
    floats = embed(server, input=TEXTS[0], encoding_format="float")[0]
    (encoded,) = embed(server, input=TEXTS[0], encoding_format="base64")
    assert array("f", b64decode(encoded)).tolist() == floats  # type: ignore[arg-type]


def test_token_ids_are_taken_as_they_are(server: Server, reference: Any) -> None:
    lists = [[5, 6, 7], [8], [9, 10]]
    assert embed(server, input=lists[0]) == embed(server, input=[lists[0]])
    for vector, token_ids in zip(embed(server, input=lists), lists):
        assert vector == close_to(vector_of(reference, token_ids))


def test_hundreds_of_inputs_share_a_queue_that_others_still_enter(
    server: Server, tokenizer: Any
) -> None:
    """More than the queue holds; a small call beside it is answered meanwhile."""
    texts = [f"text number {number}" for number in range(300)]
    alone = embed(server, input=texts[7:9])
    found: list[list[float]] = []
    large = threading.Thread(target=lambda: found.extend(embed(server, input=texts)))
    large.start()
    beside = [httpx.post(f"{server.url}/v1/embeddings", json={"input": "beside"}) for _ in range(5)]
    large.join()
    assert [answer.status_code for answer in beside] == [200] * 5
    assert len(found) == 300
    assert found[7] == close_to(alone[0])
    assert found[8] == close_to(alone[1])
    assert len({tuple(vector) for vector in found}) == 300
    assert server.is_idle()


def test_fewer_dimensions_are_the_first_with_length_1(server: Server) -> None:
    (whole,) = embed(server, input="a lake")
    (part,) = embed(server, input="a lake", dimensions=16)
    length = math.sqrt(sum(value * value for value in whole[:16]))
    assert part == close_to(value / length for value in whole[:16])
    (raw,) = embed(server, input="a lake", normalize=False)
    length = math.sqrt(sum(value * value for value in raw))
    assert length > 1.1
    assert whole == close_to(value / length for value in raw)


def test_a_named_prompt_is_put_before_the_input(server: Server) -> None:
    assert embed(server, input="lakes", prompt_name="query") == embed(server, input="Find: lakes")
    assert embed(server, input="lakes", prompt_name="document") == embed(server, input="lakes")
    answer = server.post({"input": "lakes", "prompt_name": "quary"}, "/v1/embeddings")
    assert_refused(answer, 400, "prompt_name")
    assert "Did you mean 'query'?" in answer.text


def test_an_input_is_cut_before_the_end_token_and_only_if_asked(
    server: Server, reference: Any, tokenizer: Any
) -> None:
    text = "b" * 600
    answer = server.post({"input": ["short", text]}, "/v1/embeddings")
    assert_refused(answer, 400, "input")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in answer.text
    for limit, num_tokens in ((-1, 512), (10, 10)):
        (vector,) = embed(server, input=text, truncate_prompt_tokens=limit)
        ids = tokenizer(text, truncation=True, max_length=num_tokens).input_ids
        assert len(ids) == num_tokens
        assert vector == close_to(vector_of(reference, ids))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [999]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2**64}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "ab", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"input": "a", "dimensions": 49}, "dimensions"),
        ({"input": "a", "input_type": "query"}, "input_type"),
        ({"input": "a", "task": "retrieval.query"}, "task"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "priority": -1}, "priority"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    server: Server, fields: Any, param: str
) -> None:
    refused = server.post(fields, "/v1/embeddings")
    assert_refused(refused, 400, param)
    if param == "encoding_format":
        assert "It must be one of float, base64." in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_sorted_by_relevance(
    server: Server, reference: Any, tokenizer: Any, path: str
) -> None:
    """An embedding model compares embeddings, with its own prompts for queries and documents."""
    query = vector_of(reference, tokenizer("Find: lakes").input_ids)
    expected = {
        i: cosine(query, vector_of(reference, tokenizer(t).input_ids)) for i, t in enumerate(TEXTS)
    }
    documents = [TEXTS[0], {"text": TEXTS[1], "title": "unused"}, *TEXTS[2:]]
    answer = server.post({"query": "lakes", "documents": documents}, path).json()
    assert [one["index"] for one in answer["results"]] == sorted(
        expected, key=lambda i: -expected[i]
    )
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=2e-5)
        assert "document" not in one
    num_tokens = len(tokenizer("Find: lakes").input_ids) + sum(
        len(tokenizer(t).input_ids) for t in TEXTS
    )
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_the_best_documents_are_repeated_if_asked(server: Server) -> None:
    fields = {"query": "lakes", "documents": TEXTS, "top_n": 2, "return_documents": True}
    results = server.post(fields, "/v1/rerank").json()["results"]
    assert [one["document"] for one in results] == [
        {"text": TEXTS[one["index"]]} for one in results
    ]
    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]


def test_scores_are_of_one_with_one_one_with_many_or_pairs(server: Server) -> None:
    def scores(first: Any, second: Any) -> list[float]:
        answer = server.post({"text_1": first, "text_2": second}, "/v1/score").json()
        assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
        return [one["score"] for one in answer["data"]]

    many = scores("lakes", TEXTS)
    assert [scores("lakes", text)[0] for text in TEXTS] == pytest.approx(many, abs=1e-5)
    assert scores(["lakes"], TEXTS) == pytest.approx(many, abs=1e-5)
    assert scores(["lakes"] * 4, TEXTS) == pytest.approx(many, abs=1e-5)
    assert_refused(server.post({"text_1": ["a", "b"], "text_2": TEXTS}, "/v1/score"), 400, "text_1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ({"query": "a", "documents": ["b" * 600]}, "input"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(server: Server, fields: Any, param: str) -> None:
    answer = server.post(fields, "/v1/rerank")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_a_model_without_a_head_says_so_to_chats_and_in_its_card(server: Server) -> None:
    answer = server.post({"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions")
    assert answer.status_code == 400
    answer = server.post({"prompt": "Hi"}, "/v1/completions")
    assert_refused(answer, 400, "model")
    assert "no language-model head" in answer.text
    (card,) = server.http.get(f"{server.url}/v1/models").json()["data"]
    assert card["tasks"] == ["embed", "score"]


def test_a_client_that_leaves_takes_its_inputs_along(server: Server) -> None:
    texts = [f"{number} " + "c" * 500 for number in range(400)]
    body = json.dumps({"input": texts})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", content=body, timeout=0.5)
    with httpx.Client(timeout=30.0) as client:
        assert client.post(f"{server.url}/v1/embeddings", json={"input": "next"}).status_code == 200
    deadline = threading.Event()
    for _ in range(100):
        if server.is_idle():
            break
        deadline.wait(0.1)
    assert server.is_idle()


def test_prompts_that_gave_vectors_are_counted(server: Server) -> None:
    def num_counted() -> int:
        lines = server.http.get(f"{server.url}/metrics").text.splitlines()
        return int(
            next(
                line.split()[1] for line in lines if line.startswith("penstock_prompt_tokens_total")
            )
        )

    before = num_counted()
    embed(server, input=[[1, 2, 3], [4, 5]])
    assert num_counted() == before + 5


@pytest.mark.slow
def test_a_call_outlives_its_engine(server: Server) -> None:
    """Inputs under way restart with the next engine; vectors that have arrived are kept."""
    texts = [f"{number} " + "d" * 300 for number in range(200)]
    found: list[list[float]] = []
    asking = threading.Thread(target=lambda: found.extend(embed(server, input=texts)))
    asking.start()
    while server.stats()["num_running"] == 0:
        pass
    os.kill(server.engine_pid, signal.SIGKILL)
    asking.join()
    assert len(found) == 200
    for number in (0, 100, 199):
        assert found[number] == close_to(embed(server, input=texts[number])[0])


# Ollama's


def test_ollamas_client_gets_the_same_vectors(server: Server) -> None:
    client = ollama.Client(host=server.url, timeout=60.0)
    reply = client.embed("any", TEXTS)
    assert [list(vector) for vector in reply.embeddings] == [
        close_to(vector) for vector in embed(server, input=TEXTS)
    ]
    assert reply.prompt_eval_count > len(TEXTS)
    assert reply.total_duration > 0
    (short,) = client.embed("any", TEXTS[0], dimensions=8).embeddings
    assert list(short) == close_to(embed(server, input=TEXTS[0], dimensions=8)[0])
    one = client.embeddings("any", TEXTS[0]).embedding
    (whole,) = embed(server, input=TEXTS[0], normalize=False)
    assert list(one) == close_to(whole)
    assert client.embed("any", []).embeddings == []


def test_a_text_beyond_the_context_is_cut_as_ollama_does_unless_it_shall_not_be(
    server: Server,
) -> None:
    body: dict[str, Any] = {"model": "any", "input": "river " * 3000}
    assert server.post(body, "/api/embed").status_code == 200
    refused = server.post({**body, "truncate": False}, "/api/embed")
    assert refused.status_code == 400
    assert isinstance(refused.json()["error"], str)
