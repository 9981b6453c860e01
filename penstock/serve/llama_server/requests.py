"""The body of llama-server's /completion: decodes a POST into the completion that every API shares.

Fields about speed, caches and slots change no reply and are ignored; samplers that do not exist
here are refused by name. A prompt may mix texts and token ids, which routes.py joins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import decode_body, renaming
from penstock.serve.fields import LLAMA_COMPLETION, FieldTable
from penstock.serve.llama_options import LlamaOptions, require_off, sampling_fields
from penstock.serve.openai.chat_options import JsonForm
from penstock.serve.openai.forms import TextForm
from penstock.serve.openai.requests import CompletionBody, completion_request
from penstock.serve.requests import (
    MAX_CHARS_ASKED,
    MAX_ID_VALUES,
    CacheSalt,
    CompletionRequest,
    Defaults,
    SessionId,
)

NAMES = {
    "max_tokens": "n_predict",
    "n": "n_cmpl",
    "logprobs": "n_probs",
    "repetition_penalty": "repeat_penalty",
}
NEVER_DRAWN = -100.0
MAX_TEXTS = 256  # in a prompt that mixes texts and token ids
# The fields of each sampler, with the values that turn it off if it is not in `samplers`.
WITHOUT_SAMPLER: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
# Can only be turned off.
OTHER_SAMPLERS = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc")

MixedPrompt = list[str | int]
Prompt = str | MixedPrompt


class PromptObject(msgspec.Struct):
    prompt_string: str
    multimodal_data: list[Any] | None = None


class LlamaBody(LlamaOptions, kw_only=True):
    prompt: (
        str
        | PromptObject
        | Annotated[list[str | int | MixedPrompt | PromptObject], Meta(min_length=1)]
    )
    n_predict: int | None = None
    n_cmpl: int | None = None
    stream: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: Any = None
    return_tokens: bool | None = None
    samplers: list[str] | None = None
    response_fields: Annotated[list[str], Meta(max_length=256)] | None = None
    session_id: SessionId | None = None  # not llama-server's: a session of this server
    cache_salt: CacheSalt | None = None  # not llama-server's either
    # Accepted if they are off.
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    dynatemp_range: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    top_n_sigma: float | None = None
    n_indent: int | None = None
    min_keep: int | None = None
    t_max_predict_ms: float | None = None
    post_sampling_probs: bool | None = None
    grammar_lazy: bool | None = None
    lora: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class LlamaRequest:
    asked: CompletionRequest  # without prompts yet
    prompts: list[Prompt]
    returns_tokens: bool
    response_fields: list[str] | None  # None: all


def parse_completion(
    body: bytes, defaults: Defaults, table: FieldTable = LLAMA_COMPLETION
) -> LlamaRequest:
    fields = decode_body(body, LlamaBody, MAX_ID_VALUES, table)
    require_off(msgspec.structs.asdict(fields))
    for name in ("post_sampling_probs", "grammar_lazy", "lora"):
        if getattr(fields, name):
            raise RequestError(f"{name} is not supported", todo="Omit it.", param=name)
    prompts = _prompts_of(fields.prompt)
    openai_body = CompletionBody(
        prompt=[""] * len(prompts),
        n=fields.n_cmpl,
        stream=fields.stream,
        ignore_eos=fields.ignore_eos,
        logit_bias=_biases(fields.logit_bias),
        logprobs=fields.n_probs or None,
        session_id=fields.session_id,
        cache_salt=fields.cache_salt,
    )
    for name, value in {**sampling_fields(fields), **_without_samplers(fields.samplers)}.items():
        setattr(openai_body, name, value)
    with renaming(NAMES):
        asked = completion_request(openai_body, defaults)
        is_limited = fields.n_predict is not None and fields.n_predict >= 0
        sampling = replace(asked.sampling, max_tokens=fields.n_predict if is_limited else None)
    asked = replace(
        asked,
        sampling=sampling,
        is_cut_to_context=True,
        output=replace(asked.output, returns_token_ids=True),
        **_form_of(fields),
    )
    return LlamaRequest(
        asked, prompts, bool(fields.return_tokens or fields.stream), fields.response_fields
    )


def _prompts_of(prompt: Any) -> list[Prompt]:
    """A list of texts is several prompts; a list of token ids, or a mixture of both, is one
    prompt."""
    if not isinstance(prompt, list):
        return [_text_of(prompt)]
    if all(isinstance(part, str | int) for part in prompt) and any(
        isinstance(part, int) for part in prompt
    ):
        return [_checked(prompt)]
    for part in prompt:
        if isinstance(part, int):
            raise RequestError(
                "prompt mixes token ids and prompts",
                "It must be one prompt, or a list of prompts.",
                param="prompt",
            )
    return [_checked(part) if isinstance(part, list) else _text_of(part) for part in prompt]


def _checked(parts: MixedPrompt) -> MixedPrompt:
    texts = [part for part in parts if isinstance(part, str)]
    num_chars = sum(map(len, texts))
    if len(texts) > MAX_TEXTS or num_chars > MAX_CHARS_ASKED:
        raise RequestError(
            f"A prompt of token ids contains {len(texts)} texts with {num_chars} characters",
            f"The limits are {MAX_TEXTS} texts and {MAX_CHARS_ASKED} characters.",
            param="prompt",
        )
    return parts


def _text_of(prompt: str | PromptObject) -> str:
    if isinstance(prompt, str):
        return prompt
    if prompt.multimodal_data:
        raise RequestError(
            "multimodal_data is not supported",
            "This model reads only text.",
            "Omit it.",
            param="multimodal_data",
        )
    return prompt.prompt_string


def _biases(
    biases: dict[str, float] | list[tuple[int | str, float | bool]] | None,
) -> dict[str, float] | None:
    if not isinstance(biases, list):
        return biases
    return {str(token): _bias(bias) for token, bias in biases}


def _bias(bias: float | bool) -> float:
    if bias is True:
        raise RequestError(
            "logit_bias is true", "It must be a number, or false.", param="logit_bias"
        )
    return NEVER_DRAWN if bias is False else bias


def _without_samplers(samplers: list[str] | None) -> dict[str, float]:
    """Turns off samplers that are not listed; the order of the list is ignored."""
    if samplers is None:
        return {}
    for name in samplers:
        if name not in WITHOUT_SAMPLER and name not in OTHER_SAMPLERS:
            raise RequestError(
                f"samplers has {name[:32]!r}",
                f"This server has {', '.join(WITHOUT_SAMPLER)}.",
                param="samplers",
            )
    missing = [fields for name, fields in WITHOUT_SAMPLER.items() if name not in samplers]
    return {field: off for fields in missing for field, off in fields.items()}


def _form_of(fields: LlamaBody) -> dict[str, Any]:
    if fields.grammar and fields.json_schema is not None:
        raise RequestError(
            "grammar and json_schema are both set",
            "Only one of them can be enforced.",
            param="grammar",
        )
    if fields.grammar:
        return {"text_form": TextForm("grammar", fields.grammar, "grammar")}
    if fields.json_schema is not None:
        return {"json_form": JsonForm(fields.json_schema, param="json_schema")}
    return {}
