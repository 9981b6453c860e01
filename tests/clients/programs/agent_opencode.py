import json

from agent import executable, run_agent
from report import API_KEY, MODEL


def command(prompt: str, goes_on: bool, url: str) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": API_KEY},
        "models": {MODEL: {"limit": {"context": 65536, "output": 64}}},
    }
    config = {
        "model": f"penstock/{MODEL}",
        "provider": {"penstock": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    environment = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return [
        executable("opencode"),
        "run",
        *(["--continue"] if goes_on else []),
        prompt,
    ], environment


run_agent("chat completions", ["read"], command)
