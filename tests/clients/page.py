"""docs/clients.md, from the results of run.py."""

from __future__ import annotations

from typing import Any

HEAD = """# Clients

Real clients against one `penstock serve`: the embedded model on a CPU, with an API key.
{counts}

`python -m tests.clients.run` installs each client into its own environment and runs its program in
`tests/clients/programs/`; it writes `results/cpu/clients.json` and generates this page from it.
`--only NAME` repeats some.

**First call scripted**: an agent's own prompt is too hard for the tiny model. A proxy gives the
first reply, a tool call in the API's own format. The agent runs the tool; the server answers the
next turn, with the history and the tool's result, and all turns after it. Such a feature passes if
the server understood and answered every turn and the agent ran to its end, whatever the model said.
Claude Code's chat uses a short system prompt instead, and nothing is scripted. The 401s are
requests that a client sends without its key: litellm's for Ollama's models, lm-eval's for the
tokenizer.

Limits of a `+`:

- The server runs the embedded model with 65,536 positions instead of 8,192, so that agents' prompts
  of up to 34,000 tokens fit. It was not trained beyond 2,300: its replies to agents are nonsense.
- Structured output passes if the reply matches the schema. The sum in it is often wrong (42 or 17
  instead of 43).
- smolagents' tools pass if its agent called the right tool; its answer is not checked.
- Each feature ran once in the run that is shown, with `max_tokens` where a weak model may not stop.
  One earlier run of guidellm's streamed tools counted 7 of 8 requests, none of them an error; the
  repetitions counted all. We do not know why.
- LangChain's `ChatOpenAI` drops the reasoning of chat completions, so thinking is not tested there.
  litellm is told by `allowed_openai_params` that this model thinks.

"""
KEY = """
`+` passes, `-` fails (see below), empty: not tested, usually because the client lacks the feature.
"""
ORDER = (
    "chat",
    "stream",
    "second turn",
    "tools",
    "streamed tools",
    "structured output",
    "thinking",
    "session",
    "embeddings",
)


def render(results: dict[str, Any]) -> str:
    clients = results["clients"].values()
    features = [feature for client in clients for feature in client.get("features", ())]
    num_passed = sum(feature["ok"] for feature in features)
    counts = f"{len(clients)} clients; {num_passed} of {len(features)} features pass."
    text = HEAD.format(counts=counts)
    names = {feature["feature"] for feature in features}
    columns = [name for name in ORDER if name in names]
    text += f"| client | version | API | {' | '.join(columns)} | also |\n"
    text += "|---" * (len(columns) + 4) + "|\n"
    for client in clients:
        text += "".join(_rows(client, columns))
    return text + KEY + _failures(clients) + _versions(clients)


def _rows(client: dict[str, Any], columns: list[str]) -> list[str]:
    title = client["title"] + (f" ({client['note']})" if client["note"] else "")
    if "not_installable" in client:
        return [f"| {title} | not installable here |" + " |" * (len(columns) + 2) + "\n"]
    version = next(iter(client["packages"].values()))
    rows = []
    for api in dict.fromkeys(feature["api"] for feature in client["features"]):
        marks = {
            one["feature"]: "+" if one["ok"] else "-"
            for one in client["features"]
            if one["api"] == api
        }
        cells = [marks.get(name, "") for name in columns]
        also = ", ".join(f"{name} {mark}" for name, mark in marks.items() if name not in columns)
        rows.append(f"| {title} | {version} | {api} | {' | '.join(cells)} | {also} |\n")
    return rows


def _failures(clients: Any) -> str:
    lines = [
        f"- {client['title']}, {feature['api']}, {feature['feature']}: {_quoted(feature['detail'])}\n"
        for client in clients
        for feature in client.get("features", ())
        if not feature["ok"]
    ]
    lines += [
        f"- {client['title']}: not installable here: {_quoted(client['not_installable'])}\n"
        for client in clients
        if "not_installable" in client
    ]
    return "\n## What fails\n\n" + ("".join(lines) or "Nothing.\n")


def _quoted(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def _versions(clients: Any) -> str:
    text = "\n## Versions\n\n| client | packages | run | answers by status |\n|---|---|---|---|\n"
    for client in clients:
        packages = ", ".join(
            f"{name} {version}" for name, version in client.get("packages", {}).items()
        )
        answers = ", ".join(
            f"{status}: {n}" for status, n in client.get("answers_by_status", {}).items()
        )
        text += f"| {client['title']} | {packages} | {client['date']}, {client['commit']} | {answers} |\n"
    return text
