"""llama-server's endpoints besides OpenAI's, and vLLM's /tokenizer_info.

llama-server's slots are rows here: the scheduler decides which row a request takes. /tokenize and
/detokenize accept its fields too (openai/routes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.errors import OverloadedError, PenstockError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import Answer, Choice, Pieces, ReplyClock, json_response, read_body
from penstock.serve.body import renaming
from penstock.serve.event_stream import HEARTBEAT_COMMENT
from penstock.serve.fields import LLAMA_COMPLETION
from penstock.serve.intake import place_of
from penstock.serve.llama_server.requests import LlamaRequest, Prompt, parse_completion
from penstock.serve.openai.replies import encode_error, encode_event
from penstock.serve.openai.requests import parse_chat
from penstock.serve.openai.scores import LOWEST_LOGPROB
from penstock.serve.requests import TokenizeRequest
from penstock.serve.sessions import completion_start
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, ReplyDelta, ScoredToken, TextStream, Usage
from penstock.text.dialects import ContentDelta, ParsedReply, ReplyEnd
from penstock.types import SamplingParams


def routes(state: ServerState) -> list[Route]:
    api = LlamaServerRoutes(state)
    return [
        Route("/completion", api.complete, methods=["POST"]),
        Route("/completions", api.complete, methods=["POST"]),
        Route("/apply-template", api.apply_template, methods=["POST"]),
        Route("/props", api.props),
        Route("/slots", api.slots),
        Route("/tokenizer_info", api.tokenizer_info),
    ]


class LlamaServerRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._text = state.text
        self._defaults = state.config.sampling_defaults
        self._table = LLAMA_COMPLETION.ignoring(state.config.ignore_field)

    async def complete(self, request: Request) -> Answer:
        asked = parse_completion(await read_body(request), self._defaults, self._table)
        formatter = LlamaFormat(self._state.model_name, ReplyClock(), asked)
        tenant = tenant_of(request.scope)

        async def start(deliver: Deliver) -> TextStream:
            prompts = [await self._put_together(prompt, tenant) for prompt in asked.prompts]
            with renaming({"tokens": "prompt"}):
                formatter.prompts = [
                    prompt if isinstance(prompt, str) else await self._text.detokenize(prompt)
                    for prompt in prompts
                ]
            completion = replace(asked.asked, prompts=prompts)
            begin = completion_start(completion, request, self._text)
            stream = await begin(formatter.clock.before(deliver))
            formatter.usage_of = stream.usage_of
            return stream

        return Answer(start, formatter, asked.asked.is_stream, new_choice=formatter.new_choice)

    async def _put_together(self, prompt: Prompt, tenant: str) -> str | list[int]:
        """Returns a text unchanged, and a mixture of texts and token ids as token ids."""
        if isinstance(prompt, str):
            return prompt
        token_ids: list[int] = []
        for place, part in enumerate(prompt):
            if isinstance(part, int):
                token_ids.append(part)
            else:
                asked = TokenizeRequest(part, add_special_tokens=place == 0)
                token_ids += await self._text.tokenize(asked, tenant, len(part))
        return token_ids

    async def apply_template(self, request: Request) -> Response:
        chat = parse_chat(await read_body(request, for_reply=False))
        return json_response(
            {"prompt": await self._text.render(chat, place_of(request.scope).num_bytes)}
        )

    async def props(self, request: Request) -> Response:
        info = self._state.client.require_ready()
        defaults: dict[str, Any] = self._state.config.sampling_defaults
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": info.max_model_len,
                    "params": settings_of(SamplingParams(**defaults)),
                },
                "total_slots": await self._num_slots(),
                "model_alias": self._state.model_name,
                "model_path": self._state.model_name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": self._text.template_source or "",
                **{
                    name: self._text.special_tokens.get(name, "")
                    for name in ("bos_token", "eos_token")
                },
                "build_info": f"penstock-{penstock.__version__}",
                "is_sleeping": False,
            }
        )

    async def _num_slots(self) -> int:
        return self._state.client.require_ready().max_rows * len(await self._state.client.report())

    async def slots(self, request: Request) -> Response:
        info = self._state.client.require_ready()
        slots: list[dict[str, Any]] = []
        for report in await self._state.client.report():
            for row in range(info.max_rows):
                is_busy = row < report.requests
                slots.append(
                    {"id": len(slots), "n_ctx": info.max_model_len, "is_processing": is_busy}
                )
        is_needed = request.query_params.get("fail_on_no_slot") == "1"
        if is_needed and all(slot["is_processing"] for slot in slots):
            raise NoSlotError(
                "No slot is available", f"All {len(slots)} are busy.", "Try again later."
            )
        return json_response(slots)

    async def tokenizer_info(self, request: Request) -> Response:
        info = self._state.client.require_ready()
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": info.max_model_len,
                **self._text.special_tokens,
                "chat_template": self._text.template_source,
            }
        )


class NoSlotError(OverloadedError):
    """llama-server's answer to `fail_on_no_slot` if no slot is free."""

    status = 503


NS_A_MS = 1e6
ANY_SLOT = -1
Fields = dict[str, Any]


class LlamaScores:
    """A list of tokens, each with its id and the likeliest tokens at its position."""

    def __init__(self) -> None:
        self._encoded = bytearray()

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        for token in tokens:
            top = [
                _scored(id, data, logprob) for id, (data, logprob) in zip(token.top_ids, token.top)
            ]
            assert token.logprob is not None  # prompts are not scored
            fields = {**_scored(token.token_id, token.data, token.logprob), "top_logprobs": top}
            self._encoded += (b"," if self._encoded else b"") + msgspec.json.encode(fields)

    def take(self) -> Pieces:
        encoded, self._encoded = self._encoded, bytearray()
        return [b"[", encoded, b"]"]


def _scored(id: int, data: bytes, logprob: float) -> Fields:
    text = data.decode("utf-8", "replace")
    return {"id": id, "token": text, "bytes": list(data), "logprob": max(logprob, LOWEST_LOGPROB)}


class LlamaFormat:
    """Each reply ends with one object that has all fields; in a stream its text was sent before.
    Several replies to one request are a list of such objects.

    `usage_of`, by the index of a reply, and `prompts` are set before the first delta.
    """

    usage_of: Callable[[int], Usage]
    prompts: list[str]

    def __init__(self, model: str, clock: ReplyClock, request: LlamaRequest) -> None:
        self.clock = clock
        self._model = model
        self._request = request
        self._sampling = request.asked.sampling
        self._choices: dict[int, Choice] = {}  # only for streams

    def new_choice(self) -> Choice:
        return Choice(scores=None if self._sampling.logprobs is None else LlamaScores())

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        if delta.index not in self._choices:
            self._choices[delta.index] = self.new_choice()
        choice = self._choices[delta.index]
        choice.take(delta)
        text = "".join(piece.text for piece in delta.deltas if isinstance(piece, ContentDelta))
        token_ids = delta.extra.token_ids if delta.extra else ()
        if not (text or token_ids or delta.logprobs):
            return b""
        usage = self.usage_of(delta.index)
        fields: Fields = {
            "index": delta.index,
            "content": text,
            "tokens": token_ids,
            "stop": False,
            "id_slot": ANY_SLOT,
            "tokens_predicted": usage.num_completion_tokens,
            "tokens_evaluated": usage.num_prompt_tokens,
        }
        if choice.scores is not None:
            fields["completion_probabilities"] = msgspec.Raw(b"".join(choice.scores.take()))
        return encode_event(msgspec.json.encode(fields))

    def encode_heartbeat(self) -> bytes:
        return HEARTBEAT_COMMENT

    def encode_end(self, usage: Usage) -> bytes:
        ends = []
        for index, choice in sorted(self._choices.items()):
            choice.token_ids.clear()  # they were sent
            ends.append(encode_event(msgspec.json.encode(self._whole(index, choice, content=""))))
        return b"".join(ends)

    def encode_failure(self, error: PenstockError) -> bytes:
        return encode_event(encode_error(error))

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        replies = [self._whole(index, choice) for index, choice in sorted(choices.items())]
        return msgspec.json.encode(replies[0] if len(replies) == 1 else replies)

    def _whole(self, index: int, choice: Choice, content: str | None = None) -> Fields:
        """`content` replaces the whole text of the reply."""
        end = choice.deltas[-1]
        assert isinstance(end, ReplyEnd)
        said = ParsedReply.of(choice.deltas).content
        usage = self.usage_of(index)
        fields: Fields = {
            "index": index,
            "content": said if content is None else content,
            "tokens": choice.token_ids if self._request.returns_tokens else [],
            "id_slot": ANY_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.num_completion_tokens,
            "tokens_evaluated": usage.num_prompt_tokens,
            "generation_settings": settings_of(self._sampling),
            "prompt": self.prompts[index // self._sampling.n],
            "has_new_line": "\n" in said,
            "truncated": False,  # a prompt that does not fit is refused
            "stop_type": _stop_type(end),
            "stopping_word": end.stop_string or "",
            "tokens_cached": usage.num_cached_tokens,
            "timings": _timings(usage, self.clock),
        }
        if choice.scores is not None and content is None:
            fields["completion_probabilities"] = msgspec.Raw(b"".join(choice.scores.take()))
        names = self._request.response_fields
        return fields if names is None else _selected(fields, names)


def settings_of(sampling: SamplingParams) -> Fields:
    """Sampling parameters by llama-server's names."""
    return {
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": sampling.stop,
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
    }


def _selected(fields: Fields, names: list[str]) -> Fields:
    """The fields that exist; `a/b` selects the field b of a, and is named b."""
    selected: Fields = {}
    for name in names:
        outer, _, inner = name.partition("/")
        if not inner and outer in fields:
            selected[outer] = fields[outer]
        elif isinstance(fields.get(outer), dict) and inner in fields[outer]:
            selected[inner] = fields[outer][inner]
    return selected


def _stop_type(end: ReplyEnd) -> str:
    if end.reason == "length":
        return "limit"
    return "eos" if end.stop_string is None else "word"


def _timings(usage: Usage, clock: ReplyClock) -> Fields:
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    prompt_ms, reply_ms = max(1, clock.prompt_ns) / NS_A_MS, clock.reply_ns / NS_A_MS
    return {
        "cache_n": usage.num_cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, num_computed),
        "prompt_per_second": 1e3 * num_computed / prompt_ms,
        "predicted_n": usage.num_completion_tokens,
        "predicted_ms": reply_ms,
        "predicted_per_token_ms": reply_ms / max(1, usage.num_completion_tokens),
        "predicted_per_second": 1e3 * usage.num_completion_tokens / reply_ms,
    }
