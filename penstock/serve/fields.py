"""Fields that no struct of an API declares: ignored on purpose, or refused by name.

A struct's own fields are supported. For all others, each API has a table of those that are ignored
with any value, those that are ignored with a neutral value, and what to use instead of known ones.
Any other field is refused, unless it is null or empty: it could change the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec

from penstock.errors import RequestError, nearest

Body = TypeVar("Body", bound=msgspec.Struct)
Neutral = Mapping[str, tuple[Any, ...]]


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _each(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


# Ignored with any value, by the reason why that is harmless. docs/api.md lists them in this order.
ACCOUNTING = """user metadata store service_tier safety_identifier request_id rid client_metadata
user_profile_id workspace_id access_programs inference_geo betas anthropic_version anthropic_beta
trace tags billing_policy"""
CACHING = """prompt_cache_retention prompt_cache_options cache_control cache_prompt id_slot
keep_alive ttl draft_model prediction speed diagnostics"""
ROUTING = """provider models route transforms fallbacks fallback_credit_token data_parallel_rank
routed_dp_rank guided_decoding_backend chat_id"""
HINTS = """verbosity num_ctx context_management max_tool_calls tool_stream disable_tool_validation
timings_per_token return_progress perf_metrics_in_response vl_high_resolution_images"""
SWITCHED_OFF = """mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers xtc_threshold repeat_last_n min_keep"""
IGNORED = {
    "identity and billing": ACCOUNTING,
    "hints about caching and speed": CACHING,
    "choice of server or backend": ROUTING,
    "hints that do not change an answer": HINTS,
    "parameters of methods that are refused themselves": SWITCHED_OFF,
}

# Ignored with one of these values, refused with any other.
NEUTRAL: Neutral = {
    "modalities": (["text"],),
    "do_sample": (True,),
    "use_beam_search": (False,),
    "length_penalty": (0, 1),
    "early_stopping": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True, False),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_split": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "parse_tool_calls": (True,),
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "n_probs": (0,),
    "n_keep": (-1, 0),
    "post_sampling_probs": (False,),
    "safe_prompt": (False,),
    "enable_search": (False,),
    "context_length_exceeded_behavior": ("error",),
    "raw_output": (False,),
}

NO_SERVER_TOOLS = "The server runs no tools: offer functions in tools and run them yourself."
TEXT_ONLY = "This server reads and writes only text."
NOT_SAMPLED = (
    "This server has no such sampler. Use temperature, top_p, top_k, min_p and the penalties."
)
LEAVE_OUT = "Leave it out."
ADVICE = {  # what to use instead of a known field that cannot be honoured
    "extra_body": "Send its fields at the top level of the body, as OpenAI's client does.",
    "options": "Send its fields at the top level of the body.",
    "parameters": "Send its fields at the top level of the body.",
    "inputs": "Send messages, or a prompt.",
    "audio": TEXT_ONLY,
    "modalities": TEXT_ONLY,
    "image": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "prompt_embeds": "Send the prompt as text or token ids.",
    "web_search_options": NO_SERVER_TOOLS,
    "plugins": NO_SERVER_TOOLS,
    "enable_search": NO_SERVER_TOOLS,
    "mcp_servers": NO_SERVER_TOOLS,
    "container": NO_SERVER_TOOLS,
    "suffix": "The model only continues text.",
    "best_of": "Every reply is returned: use n.",
    "moderation": "This server moderates nothing. Leave it out.",
    "documents": "Put the documents into a message.",
    "chat_template": "The operator chooses the template, with --chat-template.",
    "allowed_token_ids": "Use logit_bias, or a structured_outputs choice.",
    "logits_processors": "Use logit_bias.",
    "custom_logit_processor": "Use logit_bias.",
    "extra_key": "Use cache_salt.",
    "lora_path": "This server has one model.",
    "guided_whitespace_pattern": "White space in JSON is limited already. Leave it out.",
    "structural_tag": "Use tools with tool_choice, or a grammar.",
    "reasoning_format": "Reasoning is in reasoning_content. To leave it out, use "
    "include_reasoning: false.",
    "max_new_tokens": "Use max_tokens.",
    "max_length": "Use max_tokens.",
    "n_predict": "Use max_tokens.",
    "num_predict": "Use max_tokens.",
    "max_output_tokens": "Use max_tokens.",
    "random_seed": "Use seed.",
    "repeat_penalty": "Use repetition_penalty, which counts all tokens.",
    "stop_sequences": "Use stop.",
    "do_sample": "Use temperature: 0 for the likeliest tokens.",
    "format": "Use response_format.",
    "output_config": "Use response_format and reasoning_effort.",
    "system": "Send it as a message with the role system.",
    "instructions": "Send it as a message with the role system.",
    "input": "Send messages.",
    "prompt": "Send it as a message, or use /v1/completions.",
    "think": "Use thinking or reasoning_effort.",
    "previous_response_id": "Use /v1/responses, or a session_id.",
    **_each(
        "use_beam_search length_penalty early_stopping mirostat mirostat_mode typical_p tfs_z top_a"
        " top_n_sigma dynatemp_range dry_multiplier xtc_probability samplers",
        NOT_SAMPLED,
    ),
}


@dataclass(frozen=True, eq=False)
class FieldTable:
    """What to do with the fields that the structs of one API do not declare."""

    path: str  # the API's path, for messages
    ignored: frozenset[str] = _names(" ".join(IGNORED.values()))
    neutral: Neutral = field(default_factory=lambda: NEUTRAL)
    advice: Mapping[str, str] = field(default_factory=lambda: ADVICE)

    def ignoring(self, names: Iterable[str]) -> FieldTable:
        """A copy that also ignores the fields that the operator named."""
        return replace(self, ignored=self.ignored.union(names))

    def is_harmless(self, name: str, value: Any) -> bool:
        return (
            name in self.ignored or asks_for_nothing(value) or value in self.neutral.get(name, ())
        )

    def refusal(self, name: str, known: Iterable[str]) -> RequestError:
        if name in self.advice or name in self.neutral:
            return RequestError(
                f"{name} is not supported", self.advice.get(name, LEAVE_OUT), param=name
            )
        return RequestError(
            f"{self.path} has no field {name[:64]!r}",
            "It could change the answer, so it is not ignored.",
            nearest(name[:64], set(known) - self.ignored, cutoff=0.8)
            or "Omit it. The server can ignore it with --ignore-field.",
            param=name[:64],
        )


@functools.cache
def strict_struct(kind: type[Body], table: FieldTable) -> type[Body]:
    """A struct with the ignored fields added, which refuses all others."""
    new = sorted(table.ignored.difference(kind.__struct_encode_fields__))
    fields = [(name, Any, None) for name in new]
    strict = msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )
    return cast(type[Body], strict)


def asks_for_nothing(value: Any) -> bool:
    return value is None or value == [] or value == {}


CHAT = FieldTable(
    "/v1/chat/completions",
    neutral={**NEUTRAL, "add_special_tokens": (False,), "echo": (False,), "best_of": (1,)},
)
COMPLETIONS = FieldTable(
    "/v1/completions",
    ignored=CHAT.ignored | {"parallel_tool_calls"},
    neutral={
        **NEUTRAL,
        "add_special_tokens": (True,),
        "enable_thinking": (False,),
        "thinking": (False, {"type": "disabled"}),
        "chat_template_kwargs": ({"enable_thinking": False},),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "top_logprobs": (0,),
    },
    advice={
        **ADVICE,
        "top_logprobs": "Use logprobs, which is a number here.",
        "max_completion_tokens": "Use max_tokens.",
        **_each(
            "messages tools tool_choice chat_template_kwargs enable_thinking thinking reasoning"
            " reasoning_effort",
            "It needs a chat template: use /v1/chat/completions.",
        ),
    },
)
RESPONSES = FieldTable(
    "/v1/responses",
    neutral={**NEUTRAL, "n": (1,), "logprobs": (False,), "best_of": (1,), "echo": (False,)},
    advice={
        **ADVICE,
        "messages": "Send them as input.",
        "max_tokens": "Use max_output_tokens.",
        "max_completion_tokens": "Use max_output_tokens.",
        "n": "There is one response: send the request n times.",
        **_each(
            "response_format structured_outputs guided_json guided_regex guided_choice "
            "guided_grammar json_schema regex ebnf grammar format",
            "Use text.format, or /v1/chat/completions.",
        ),
        **_each(
            "reasoning_effort thinking enable_thinking chat_template_kwargs think output_config",
            "Use reasoning.effort.",
        ),
        "system": "Use instructions.",
        **_each(
            "stop logit_bias logprobs min_tokens stop_token_ids loop_guard functions function_call",
            "Use /v1/chat/completions, which has it.",
        ),
    },
)
MESSAGES = FieldTable(
    "/v1/messages",
    neutral={**NEUTRAL, "n": (1,)},
    advice={
        **ADVICE,
        "stop": "Use stop_sequences.",
        "max_completion_tokens": "Use max_tokens.",
        "instructions": "Use system.",
        "response_format": "Use output_config.format.",
        "format": "Use output_config.format.",
        "reasoning_effort": "Use thinking, and output_config.effort.",
        "compaction": "This server summarises no conversations: send a request for a summary.",
        **_each(
            "n seed logprobs top_logprobs logit_bias min_tokens min_p frequency_penalty "
            "presence_penalty repetition_penalty structured_outputs guided_json guided_regex "
            "guided_choice guided_grammar chat_template_kwargs",
            "Use /v1/chat/completions, which has it.",
        ),
    },
)
COUNT_TOKENS = FieldTable(
    "/v1/messages/count_tokens",
    ignored=MESSAGES.ignored
    | _names(
        "max_tokens temperature top_p top_k stop_sequences stream session_id cache_salt thread"
    ),
    neutral=MESSAGES.neutral,
    advice=MESSAGES.advice,
)
TOKENIZE = FieldTable(
    "/tokenize",
    ignored=CHAT.ignored | {"model"},
    neutral={**NEUTRAL, "continue_final_message": (False,)},
)
DETOKENIZE = replace(TOKENIZE, path="/detokenize")
INVOCATION_CHAT = replace(CHAT, path="/invocations")
INVOCATION_PROMPT = FieldTable(  # `thinking` was handled before
    "/invocations",
    ignored=COMPLETIONS.ignored | {"thinking"},
    neutral=COMPLETIONS.neutral,
    advice=COMPLETIONS.advice,
)
BATCHES = FieldTable("/v1/batches")
CONVERSATIONS = FieldTable("/v1/conversations")
COMPACT = FieldTable("/v1/responses/compact", advice=RESPONSES.advice)

CUT_TEXTS = "Use truncate_prompt_tokens; -1 cuts an input to the context."
NAMED_PROMPT = "Use prompt_name, which names a prompt of the checkpoint, such as query."
VECTOR_ADVICE = {
    **_each("truncate truncation", CUT_TEXTS),
    **_each("input_type task", NAMED_PROMPT),
    "stream": "Leave it out: the answer is never streamed.",
    "embedding_type": "Use encoding_format: float or base64.",
    "late_chunking": "Send each chunk as an input.",
    "messages": "Send the text as input.",
    "instruction": "Put the instruction before the input, or use prompt_name.",
    "max_tokens_per_doc": "Use truncate_prompt_tokens, which also counts the query.",
    "max_chunks_per_doc": "Send each chunk as a document.",
    "rank_fields": "Send the text of the fields as a document.",
}
EMBEDDINGS = FieldTable(
    "/v1/embeddings", neutral=dict.fromkeys(VECTOR_ADVICE, (False,)), advice=VECTOR_ADVICE
)
RERANK = replace(EMBEDDINGS, path="/v1/rerank")
SCORE = replace(EMBEDDINGS, path="/v1/score")

OLLAMA_CHAT = FieldTable(
    "/api/chat",
    advice={
        **ADVICE,
        **_each(
            "temperature top_p top_k min_p seed stop num_predict repeat_penalty presence_penalty"
            " frequency_penalty",
            "Send it in options.",
        ),
        "max_tokens": "Send num_predict in options.",
        "response_format": "Use format.",
        "reasoning_effort": "Use think.",
    },
)
OLLAMA_GENERATE = replace(OLLAMA_CHAT, path="/api/generate")
OLLAMA_EMBED = replace(OLLAMA_CHAT, path="/api/embed")
LLAMA_COMPLETION = FieldTable(
    "/completion",
    ignored=CHAT.ignored | _names("n_keep n_discard t_max_prompt_ms"),
    advice={
        **ADVICE,
        "image_data": TEXT_ONLY,
        "max_tokens": "Use n_predict.",
        "messages": "Use /v1/chat/completions, which has it.",
    },
)
