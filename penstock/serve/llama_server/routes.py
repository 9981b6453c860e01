"""llama-server's own endpoints beside OpenAI's, and vLLM's /tokenizer_info.

Its slots are rows here: the scheduler decides which row a request takes. /tokenize and /detokenize
accept its fields too (openai/routes.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.errors import OverloadedError
from penstock.serve.answer import Answer, json_response, read_body
from penstock.serve.fields import LLAMA_COMPLETION
from penstock.serve.intake import place_of
from penstock.serve.llama_options import renaming
from penstock.serve.llama_server.replies import LlamaFormat, settings_of
from penstock.serve.llama_server.requests import Prompt, parse_completion
from penstock.serve.openai.requests import parse_chat
from penstock.serve.reply_clock import ReplyClock
from penstock.serve.requests import TokenizeRequest
from penstock.serve.sessions import in_session
from penstock.serve.state import ServerState
from penstock.serve.tenants import tenant_of
from penstock.serve.text_stream import Deliver, TextStream
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
        request_id, place = request.scope["request_id"], place_of(request.scope)
        completion = in_session(asked.asked, request)
        tenant = tenant_of(request.scope)

        async def start(deliver: Deliver) -> TextStream:
            prompts = [await self._put_together(prompt, tenant) for prompt in asked.prompts]
            with renaming({"tokens": "prompt"}):
                formatter.prompts = [
                    prompt if isinstance(prompt, str) else await self._text.detokenize(prompt)
                    for prompt in prompts
                ]
            stream = await self._text.stream_completion(
                request_id,
                replace(completion, prompts=prompts),
                formatter.clock.before(deliver),
                place,
            )
            formatter.usage_of = stream.usage_of
            return stream

        return Answer(start, formatter, completion.is_stream, new_choice=formatter.new_choice)

    async def _put_together(self, prompt: Prompt, tenant: str) -> str | list[int]:
        """A text as it is; a mixture as token ids."""
        if isinstance(prompt, str):
            return prompt
        token_ids: list[int] = []
        for place, part in enumerate(prompt):
            token_ids += (
                [part] if isinstance(part, int) else await self._encode(part, place == 0, tenant)
            )
        return token_ids

    async def _encode(self, text: str, is_first: bool, tenant: str) -> list[int]:
        asked = TokenizeRequest(text, None, is_first, False)
        return await self._text.tokenize(asked, tenant, len(text))

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
    """llama-server's answer to a question for a free slot."""

    status = 503
