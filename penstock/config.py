"""Every setting of an engine and of a server: its name, type, default and help text.

Command-line flags are generated from these fields, so each name is written once. `aliases` are
vLLM's names for a flag, `inverse` are the names that turn a switch off (docs/vllm.md). A config is
never changed after it is built; properties derive other values from it. An error begins with `name
is value`, in which a command puts the flag or variable that was given. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "int8")  # vLLM's names and ours
EXPERT_MISSES = ("fetch", "cpu", "auto")
STATE_DTYPES = {"float32": 4, "float16": 2}  # bytes per element
LOG_FORMATS = ("text", "json")
REASONING_PLACES = ("separate", "content")
ROUTING_POLICIES = ("prefix", "least-pending", "round-robin")
# Sampling parameters that an operator may set.
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SPECULATORS = ("auto", "off", "mtp", "ngram", "suffix", "model")
USUAL_DRAFTS = {
    "mtp": 3,
    "ngram": 7,
    "suffix": 7,
    "model": 4,
}  # drafts per step if --speculate gives no number
MOST_DRAFTS = 15
POOLINGS = ("auto", "last", "mean")
SCORINGS = ("auto", "yes-no", "classifier", "cosine")
SCORE_PROMPTS = ("auto", "qwen3", "pair", "template")


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter, and the most draft tokens that a step verifies."""

    kind: str = "off"
    num_drafts: int = 0
    path: str = ""  # folder of a draft model

    @classmethod
    def parse(cls, text: str) -> Speculation:
        kind, _, number = text.partition(":")
        require_choice("speculate", kind, SPECULATORS)
        if kind == "model":
            path, _, last = number.rpartition(":")
            path, number = (path, last) if path and last.isdecimal() else (number, "")
            if not path:
                raise ConfigError(
                    f"speculate is {text!r}",
                    "It names no draft model.",
                    "Use model:FOLDER, or model:FOLDER:4 for at most 4 drafts per step.",
                )
            return dataclasses.replace(cls._counted(text, kind, number), path=path)
        return cls._counted(text, kind, number)

    @classmethod
    def _counted(cls, text: str, kind: str, number: str) -> Speculation:
        if kind in ("auto", "off"):
            if number:
                raise ConfigError(
                    f"speculate is {text!r}",
                    f"{kind} takes no number of drafts.",
                    f"Use {kind}, or a drafter with a number, such as ngram:7.",
                )
            return cls(kind)
        if not number:
            return cls(kind, USUAL_DRAFTS[kind])
        if not (number.isdecimal() and 1 <= int(number) <= MOST_DRAFTS):
            raise ConfigError(
                f"speculate is {text!r}",
                f"A step verifies 1 to {MOST_DRAFTS} drafts.",
                f"Use {kind}:{USUAL_DRAFTS[kind]}, or another number.",
            )
        return cls(kind, int(number))

    def __str__(self) -> str:
        """In the format of `--speculate`, with the number."""
        words = [self.kind, self.path, str(self.num_drafts or "")]
        return ":".join(word for word in words if word)


def setting(default: Any, help: str, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model that one engine runs, and how much of the machine it may use."""

    model: str = setting(
        "", "folder of a checkpoint, a .gguf or .pt file, or a preset like Qwen3.5-35B-A3B"
    )
    random_weights: bool = setting(
        False, "use random weights from a seed instead of the checkpoint's"
    )
    weights_seed: int = setting(0, "seed of --random-weights")
    alike_experts: bool = setting(False, "use the same random experts in all layers, which is fast")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    tp: int = setting(
        1,
        "GPUs, or CPU processes, that one model is split over (tensor parallel): each has a "
        "part of the heads, of the intermediate sizes and of the vocabulary",
        aliases=("--tensor-parallel-size", "-tp"),
    )
    ep: bool = setting(
        False,
        "with --tp, each GPU has whole experts instead of a slice of every expert "
        "(expert parallel)",
        aliases=("--enable-expert-parallel",),
    )
    custom_all_reduce: bool = setting(
        False,
        "with --tp, GPUs that can access each other's memory add small tensors through it, in one "
        "kernel; experimental (default: NCCL adds them)",
        inverse=("--disable-custom-all-reduce",),
    )
    dtype: str = setting("auto", "dtype of weights and activations", choices=DTYPES)
    kv_dtype: str = setting(
        "auto",
        "dtype of the KV cache (default: that of --dtype); fp8 and int8 halve its size",
        choices=KV_DTYPES,
        aliases=("--kv-cache-dtype",),
    )
    quantization: str = setting(
        "none",
        "quantize weights at load; a quantized checkpoint stays as it is",
        choices=("none", "fp8", "int8", "int4"),
    )
    state_dtype: str = setting(
        "float32",
        "dtype of the recurrent states of hybrid models; float16 halves their size",
        choices=tuple(STATE_DTYPES),
        aliases=("--mamba-ssm-cache-dtype",),
    )
    expert_cache: str | None = setting(
        None,
        "memory of the device for experts, such as 6GB; the others stay in RAM or in converted "
        "files (default: room for all of them, or of a converted model for what fits)",
    )
    expert_ram: str | None = setting(
        None,
        "RAM for experts, such as 40GB; the others stay in files (default: all of them or, of a "
        "converted model, the system's page cache)",
    )
    expert_misses: str = setting(
        "fetch",
        "how a GPU's missing experts in RAM are served: copied to it, multiplied by the CPU, or as "
        "measured at start (auto); the CPU rounds sums in another way than the GPU",
        choices=EXPERT_MISSES,
    )
    expert_log: str | None = setting(
        None,
        "file to log the experts of each step, for `penstock inspect experts`; only if "
        "the device does not hold all of them",
    )
    offload_layers: int | None = setting(
        None,
        "number of last layers whose dense weights stay in RAM: every step copies them to the "
        "GPU, which is slow",
    )
    timing: bool = setting(
        False,
        "print the time of steps by phase once per second; this disables CUDA graphs, so steps "
        "are slower",
    )
    experts_per_token: int | None = setting(
        None, "experts per token (default: as the model was trained; fewer change replies)"
    )
    max_model_len: int | None = setting(
        None, "longest context in tokens (default: what the model and memory allow)"
    )
    max_rows: int | None = setting(
        None,
        "sequences that may run at the same time (default: 64 on a CPU, 256 on a GPU)",
        aliases=("--max-num-seqs",),
    )
    max_step_tokens: int | None = setting(
        None,
        "tokens in one step (default: 512 on a CPU, 4096 or 16384 on a GPU, 32768 of a lone "
        "prompt)",
        aliases=("--max-num-batched-tokens",),
    )
    mixed_step_tokens: int | None = setting(
        None,
        "prefill tokens in one step while other requests decode (default: 1024 on a GPU, 8192 "
        "where it does not hold all experts)",
    )
    bulk_share: float = setting(
        0.1,
        "minimum time share of long prompts while short requests, which run first, are present; "
        "1: all requests take part in every step",
    )
    page_size: int = setting(64, "tokens per KV cache page", aliases=("--block-size",))
    memory_gb: float | None = setting(
        None,
        "GB for the cache (default: what weights, graphs and the largest step leave on a GPU, 1 GB "
        "on a CPU)",
    )
    memory_share: float | None = setting(
        None,
        "share of the GPU's memory for weights, steps and cache together (default: all that is "
        "free)",
        aliases=("--gpu-memory-utilization",),
    )
    prefix_cache: bool = setting(
        True,
        "reuse the KV and states of prompts that share a prefix",
        aliases=("--enable-prefix-caching",),
    )
    checkpoint_gb: float | None = setting(
        None,
        "GB of state checkpoints for the prefix cache of hybrid models (default: half of the state "
        "slots)",
    )
    session_gb: float | None = setting(
        None,
        "GB of the cache that sessions may keep between their requests (default: half of it; 0: "
        "none)",
    )
    session_minutes: float = setting(30.0, "minutes after which an unused session ends")
    deterministic: bool = setting(
        False, "make results independent of other requests in the batch; slower"
    )
    graphs: bool | None = setting(
        None,
        "capture decode steps as CUDA graphs at start (default: on a GPU)",
        inverse=("--enforce-eager",),
    )
    overlap: bool | None = setting(
        None,
        "plan a step while the device runs the previous one (default: on a GPU)",
        aliases=("--async-scheduling",),
    )
    speculate: str = setting(
        "auto",
        "draft tokens and verify several in one step, with the same results: mtp (the checkpoint's "
        "drafting head), ngram (what followed the same tokens before), suffix (the same, also in "
        "the tenant's earlier replies), model:FOLDER (a small model of the same tokenizer), off, "
        "or auto (mtp if the checkpoint has a head and memory has room for it, else off); mtp:3 "
        "drafts at most 3 a step",
    )
    draft_vocabulary: int = setting(
        65536,
        "the drafting head chooses among this many of the first token ids, which a BPE tokenizer "
        "gives to its most frequent tokens, on a GPU by a copy of their rows in INT4; 0: among all "
        "of them, by the model's own",
    )
    pooling: str = setting(
        "auto",
        "pool embeddings from the last token's hidden state or from the mean (default: "
        "the checkpoint's, else last)",
        choices=POOLINGS,
    )
    scoring: str = setting(
        "auto",
        "score a query and a document by the model's yes or no, by its classifier, or by "
        "the cosine of two embeddings (default: as the checkpoint says)",
        choices=SCORINGS,
    )
    score_prompt: str = setting(
        "auto",
        "prompt for yes-no and classifier scores: Qwen3-Reranker's, the tokenizer's pairs, or the "
        "chat template's with roles query and document (default: as the checkpoint says)",
        choices=SCORE_PROMPTS,
    )

    def __post_init__(self) -> None:
        _require_finite(self)
        positive: dict[str, float | None] = {
            "tp": self.tp,
            "max_rows": self.max_rows,
            "page_size": self.page_size,
            "max_model_len": self.max_model_len,
            "max_step_tokens": self.max_step_tokens,
            "mixed_step_tokens": self.mixed_step_tokens,
            "memory_gb": self.memory_gb,
            "experts_per_token": self.experts_per_token,
            "offload_layers": self.offload_layers,
            "expert_cache": read_bytes("expert_cache", self.expert_cache),
            "expert_ram": read_bytes("expert_ram", self.expert_ram),
            "session_minutes": self.session_minutes,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}", "It must be more than 0.")
        if not 0 < self.bulk_share <= 1:
            raise ConfigError(
                f"bulk_share is {self.bulk_share}", "It must be more than 0 and at most 1."
            )
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(
                f"memory_share is {self.memory_share}", "It must be more than 0 and at most 1."
            )
        if self.memory_share is not None and self.memory_gb is not None:
            raise ConfigError(
                f"memory_share is {self.memory_share} and memory_gb is {self.memory_gb}",
                "Both set the size of the cache.",
                "Set only one of them.",
            )
        if self.session_gb is not None and not self.session_gb >= 0:
            raise ConfigError(
                f"session_gb is {self.session_gb}", "It must be 0, for no sessions, or more."
            )
        if self.checkpoint_gb is not None and self.checkpoint_gb < 0:
            raise ConfigError(
                f"checkpoint_gb is {self.checkpoint_gb}", "It must be 0, for none, or more."
            )
        if self.draft_vocabulary < 0:
            raise ConfigError(
                f"draft_vocabulary is {self.draft_vocabulary}",
                "It must be 0, for all tokens, or more.",
            )
        if self.deterministic and self.page_size % 64:
            raise ConfigError(
                f"page_size is {self.page_size} and deterministic is on",
                "The delta rule works on blocks of 64 tokens; a prefix that ends inside a block "
                "rounds differently.",
                "Use a multiple of 64.",
            )
        if self.deterministic and self.state_dtype != "float32":
            raise ConfigError(
                f"state_dtype is {self.state_dtype} and deterministic is on",
                "A float16 state is rounded at the end of each step, and where steps end depends "
                "on other requests.",
                "Set only one of them.",
            )
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("expert_misses", self.expert_misses, EXPERT_MISSES)
        require_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        require_choice("state_dtype", self.state_dtype, tuple(STATE_DTYPES))
        Speculation.parse(self.speculate)
        require_choice("pooling", self.pooling, POOLINGS)
        require_choice("scoring", self.scoring, SCORINGS)
        require_choice("score_prompt", self.score_prompt, SCORE_PROMPTS)

    def check_ranks(self) -> None:
        """When `tp` is final: a server may choose it."""
        if self.tp > 1:
            return
        if self.ep:
            raise ConfigError(
                "ep is on, but the model has one rank",
                "With --ep, experts are spread over the ranks of --tp: one rank has all of them.",
                "Set --tp to the number of GPUs, or omit --ep.",
            )
        if self.custom_all_reduce:
            raise ConfigError(
                "custom_all_reduce is on, but the model has one rank",
                "One rank has nothing to add to its sums.",
                "Set --tp to the number of GPUs, or omit --custom-all-reduce.",
            )

    @property
    def speculation(self) -> Speculation:
        """No drafter until `auto` is resolved."""
        read = Speculation.parse(self.speculate)
        return read if read.num_drafts else Speculation()

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a recurrent state."""
        return STATE_DTYPES[self.state_dtype]

    @property
    def expert_cache_bytes(self) -> int | None:
        return read_bytes("expert_cache", self.expert_cache)

    @property
    def expert_ram_bytes(self) -> int | None:
        return read_bytes("expert_ram", self.expert_ram)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(EngineConfig):
    """The settings that a server sends to its engine process."""

    tokenizer: str | None = setting(None, "the server's tokenizer; grammars are compiled for it")
    warm_prompt: tuple[int, ...] = setting((), "token ids to prefill before the first request")
    warm_tenants: tuple[str, ...] = setting(
        ("",), "tenants to prefill it for: tenants share no cache"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens, which clients it answers, and within which limits."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = setting(8000, "port to listen on")
    served_model_name: str | None = setting(
        None, "name in /v1/models and in answers (default: the folder's)"
    )
    tokenizer: str | None = setting(
        None, "folder or tokenizer.json to use (default: the model's own)"
    )
    replicas: int = setting(
        1,
        "engine processes to serve with, each on a GPU of its own where there are GPUs, or on --tp "
        "of them",
        aliases=("--data-parallel-size",),
    )
    gpus: tuple[int, ...] = setting(
        (), "GPUs to use, one engine process on each, or on each --tp of them"
    )
    routing: str = setting(
        "prefix",
        "how to choose an engine for a request: the least busy, or one that has its prefix cached, "
        "the one with the fewest requests, or each in turn",
        choices=ROUTING_POLICIES,
    )
    hang_timeout: float = setting(
        1.5, "seconds of silence after which an engine process is replaced"
    )
    step_timeout: float = setting(
        60.0, "seconds in one step after which an engine process is replaced"
    )
    resume_timeout: float = setting(
        30.0, "seconds that requests of a lost engine wait for another one before they fail"
    )
    drain_timeout: float = setting(
        30.0, "seconds for running replies to finish when the server or an engine stops"
    )
    system_prompt_file: str | None = setting(
        None,
        "text file with the system prompt of chats that have none, computed before the first "
        "request",
    )
    chat_template: str | None = setting(
        None,
        "file with a chat template, or no-think: Qwen's without thinking (default: the model's "
        "own)",
    )
    session_mb: float = setting(
        256.0,
        "MB of messages kept for sessions, so that a request can send only new messages (0: none)",
    )
    enable_thinking: bool | None = setting(
        None, "whether the model thinks by default (default: what the chat template does)"
    )
    thinking_share: float = setting(
        0.5,
        "share of max_tokens after which thinking ends if a request sets no budget, at least 16 "
        "tokens; 1: never",
    )
    reasoning: str = setting(
        "separate",
        "where chat completions put thinking: reasoning_content, or content between <think> tags",
        choices=REASONING_PLACES,
    )
    loop_guard: bool = setting(
        False,
        "end thinking and replies that only repeat themselves, unless a request sets otherwise",
    )
    generation_config: str = setting(
        "auto",
        "default sampling parameters: auto reads the checkpoint's generation_config.json, off (or "
        "vllm) reads no file; or a file or folder",
    )
    temperature: float | None = setting(
        None, "default for requests (default: from --generation-config, or 0, greedy)"
    )
    top_p: float | None = setting(
        None, "default for requests (default: from --generation-config, or 1)"
    )
    top_k: int | None = setting(
        None, "default for requests (default: from --generation-config, or 0, off)"
    )
    min_p: float | None = setting(
        None, "default for requests (default: from --generation-config, or 0)"
    )
    repetition_penalty: float | None = setting(
        None, "default for requests (default: from --generation-config, or 1, off)"
    )
    greedy: bool = setting(False, "the same as --temperature 0")
    sampling_seed: int | None = setting(
        None,
        "base seed for requests without their own, in order of arrival (default: random)",
        aliases=("--seed",),
    )
    open_schemas: bool = setting(
        False,
        "allow object keys that a JSON schema does not list, if the schema says nothing about them",
    )
    ignore_field: tuple[str, ...] = setting(
        (), "unknown request field to ignore instead of refusing the request; may be repeated"
    )
    allow_special_tokens_in_content: bool = setting(
        False, "treat control tokens inside messages and tools as control tokens, not as text"
    )
    api_key: tuple[str, ...] = dataclasses.field(
        default=(),
        repr=False,
        metadata={
            "help": "a key that clients must send; may be repeated; other users can see it in `ps`"
        },
    )
    api_key_file: str | None = setting(None, "file with API keys, one per line")
    relay_key: str | None = dataclasses.field(
        default=None,
        repr=False,
        metadata={
            "help": "key of a relay in front of this server, which may continue replies of others "
            "like it; penstock.ray sets it"
        },
    )
    cors_origin: tuple[str, ...] = setting(
        (), "web origin whose pages may call this server, or *; may be repeated"
    )
    page: bool = setting(
        True, "serve a web page for chatting and monitoring at the server's address"
    )
    allowed_host: tuple[str, ...] = setting(
        (), "name by which clients may call a server without keys, or *; may be repeated"
    )
    max_connections: int | None = setting(
        None,
        "maximum open connections; more get a 503 (default: what the limit on open files allows)",
    )
    max_queue: int = setting(
        1024,
        "maximum concurrent requests, including queued ones; more get a 429 with Retry-After",
    )
    min_priority: int = setting(0, "lowest `priority` that clients may set; lower runs first")
    max_body_mb: float = setting(32.0, "largest request body in MB; a larger one gets a 413")
    max_bodies_mb: float = setting(
        512.0,
        "MB of all request bodies in preparation; beyond it, requests get a 429 with Retry-After",
    )
    read_timeout: float = setting(
        30.0,
        "seconds for a client to send a body (headers: at most 10); then the connection is closed",
    )
    request_timeout: float | None = setting(
        None, "seconds a request may wait and run; a request's own `timeout` may only be shorter"
    )
    batch_folder: str | None = setting(
        None,
        "folder for /v1/files and /v1/batches, one for each server (default: no files and batches)",
    )
    batch_file_mb: float = setting(1024.0, "largest uploaded file in MB; a larger one gets a 413")
    batch_gb: float = setting(
        16.0, "GB of all files in it, including results; beyond it, uploads get a 507"
    )
    log_format: str = setting(
        "text", "format of the log on stderr, one line per request", choices=LOG_FORMATS
    )

    def __post_init__(self) -> None:
        _require_finite(self)
        positive: dict[str, float | None] = {
            "replicas": self.replicas,
            "hang_timeout": self.hang_timeout,
            "step_timeout": self.step_timeout,
            "resume_timeout": self.resume_timeout,
            "drain_timeout": self.drain_timeout,
            "max_connections": self.max_connections,
            "max_queue": self.max_queue,
            "max_body_mb": self.max_body_mb,
            "max_bodies_mb": self.max_bodies_mb,
            "read_timeout": self.read_timeout,
            "request_timeout": self.request_timeout,
            "batch_file_mb": self.batch_file_mb,
            "batch_gb": self.batch_gb,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}", "It must be more than 0.")
        if not self.session_mb >= 0:
            raise ConfigError(
                f"session_mb is {self.session_mb}",
                "It must be 0, for no messages in sessions, or more.",
            )
        for name in self.allowed_host:
            if not name or "/" in name:
                raise ConfigError(
                    f"allowed_host is {name!r}",
                    "It must be a host name, without http:// and without a path.",
                    "Use a name such as penstock.example.com, or * for all names.",
                )
        if self.min_priority > 0:
            raise ConfigError(
                f"min_priority is {self.min_priority}",
                "It must be 0 or less: the default priority of requests is 0.",
            )
        require_choice("log_format", self.log_format, LOG_FORMATS)
        require_choice("routing", self.routing, ROUTING_POLICIES)
        require_choice("reasoning", self.reasoning, REASONING_PLACES)
        if not 0 < self.thinking_share <= 1:
            raise ConfigError(
                f"thinking_share is {self.thinking_share}",
                "It must be more than 0 and at most 1.",
                "To turn thinking off, use --no-enable-thinking.",
            )
        if self.greedy and self.temperature:
            raise ConfigError(
                f"greedy is on and temperature is {self.temperature}",
                "Greedy decoding means temperature 0.",
                "Set only one of them.",
            )

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters for requests that set none; for the rest, the defaults of
        `SamplingParams` hold."""
        given = {
            name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None
        }
        return {**given, "temperature": 0.0} if self.greedy else given

    @property
    def silent_sampling(self) -> dict[str, float]:
        """The same, completed with the defaults that neither a flag nor the checkpoint sets."""
        plain = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return {**plain, **self.sampling_defaults}

    def with_sampling_of(self, checkpoint: dict[str, Any]) -> ServeConfig:
        """A copy with the checkpoint's sampling parameters where the operator set none."""
        return dataclasses.replace(
            self,
            **{
                name: value
                for name, value in checkpoint.items()
                if name not in self.sampling_defaults
            },
        )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1024**2)

    @property
    def max_bodies_bytes(self) -> int:
        return int(self.max_bodies_mb * 1024**2)

    @property
    def batch_file_bytes(self) -> int:
        return int(self.batch_file_mb * 1024**2)

    @property
    def batch_bytes(self) -> int:
        return int(self.batch_gb * 1024**3)

    @property
    def session_bytes(self) -> int:
        return int(self.session_mb * 1024**2)

    def load_api_keys(self) -> tuple[str, ...]:
        """The keys from flags and file. If empty, no key is required."""
        keys = self.api_key
        if self.api_key_file is not None:
            keys += _keys_in(Path(self.api_key_file).expanduser())
        for key in keys:
            if not (key.isascii() and key.isprintable() and key.strip() == key and key):
                raise ConfigError(
                    "An API key cannot be used",
                    "It is empty, has spaces around it, or has characters that a header cannot "
                    "carry.",
                )
        return keys


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}",
            f"It must be one of {', '.join(choices)}.",
            nearest(value, choices),
        )


def _require_finite(config: Any) -> None:
    """`inf` and `nan` are floats too, but no amount of bytes or seconds."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field.name} is {value}", "It must be a finite number.")


def _keys_in(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = f"{error.strerror or error}." if isinstance(error, OSError) else "It is not UTF-8."
        raise ConfigError(
            f"Cannot read API keys from {path}", why, "Check the file and its permissions."
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(
            f"{path} has no API keys",
            "Without a key, the server would answer everyone.",
            "Write one key per line, or omit --api-key-file.",
        )
    return keys


def read_bytes(name: str, text: str | None) -> int | None:
    """`6GB` or `512MB`, in powers of ten; a number without a unit means GB."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(TB|GB|MB|kB|KB|)", text.strip())
    if match is None:
        raise ConfigError(
            f"{name} is {text!r}", "It must be an amount of memory.", "Write it as 6GB or 512MB."
        )
    power = {"T": 12, "G": 9, "": 9, "M": 6, "K": 3}[match[2][:1].upper()]
    return int(float(match[1]) * 10**power)


def from_mapping(cls: type[Any], values: dict[str, Any]) -> Any:
    """Builds a config from names and values; an unknown name raises an error with the nearest known
    one."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{cls.__name__} has no setting {name!r}",
                f"It has {', '.join(known)}.",
                nearest(name, known),
            )
    return cls(**values)
