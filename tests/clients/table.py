"""The clients of the matrix: what is installed for each, and the program that tests it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
SCRIPTED = "first call scripted"


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    title: str
    packages: tuple[str, ...]  # as pip or npm takes them; the first is the client's version
    program: str  # in programs/: a .mjs is run by node, an agent's by our own Python
    note: str = ""

    @property
    def is_npm(self) -> bool:
        return self.is_agent or self.program.endswith(".mjs")

    @property
    def is_agent(self) -> bool:
        """Whether the client is a program of its own, which ours starts; others are libraries."""
        return self.program.startswith("agent_")


CLIENTS = (
    Client("openai-python", "openai (Python)", ("openai",), "openai_python.py"),
    Client("anthropic-python", "anthropic (Python)", ("anthropic",), "anthropic_python.py"),
    Client(
        "vercel-ai-sdk",
        "Vercel AI SDK",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        "vercel_ai_sdk.mjs",
    ),
    Client(
        "claude-code",
        "Claude Code",
        ("@anthropic-ai/claude-code",),
        "agent_claude_code.py",
        SCRIPTED,
    ),
    Client("codex", "Codex", ("@openai/codex",), "agent_codex.py", SCRIPTED),
    Client(
        "langchain",
        "LangChain",
        ("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
        "langchain_all.py",
    ),
    Client("litellm", "litellm", ("litellm", "mcp"), "litellm_all.py"),
    Client(
        "pydantic-ai", "pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai_all.py"
    ),
    Client("openai-agents", "openai-agents", ("openai-agents",), "openai_agents.py"),
    Client("opencode", "opencode", ("opencode-ai",), "agent_opencode.py", SCRIPTED),
    Client("qwen-code", "qwen-code", ("@qwen-code/qwen-code",), "agent_qwen_code.py", SCRIPTED),
    Client(
        "llama-index",
        "LlamaIndex",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
        "llama_index_all.py",
    ),
    Client("instructor", "instructor", ("instructor[anthropic]",), "instructor_all.py"),
    Client("smolagents", "smolagents", ("smolagents[openai]",), "smolagents_all.py"),
    Client("ollama", "ollama (Python)", ("ollama",), "ollama_python.py"),
    Client("lm-eval", "lm-eval", ("lm-eval[api]", "transformers"), "lm_eval_all.py"),
    Client("guidellm", "guidellm", ("guidellm",), "guidellm_all.py"),
    Client("openai-javascript", "openai (JavaScript)", ("openai", "zod"), "openai_javascript.mjs"),
    Client(
        "anthropic-javascript",
        "anthropic (JavaScript)",
        ("@anthropic-ai/sdk", "zod"),
        "anthropic_javascript.mjs",
    ),
)
