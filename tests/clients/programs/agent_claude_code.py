import os
from pathlib import Path

from agent import executable, run, run_agent
from report import API_KEY, BASE_URL, MODEL, SUM, feature


def command(prompt: str, goes_on: bool, url: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": API_KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    }
    return [
        executable("claude"),
        "--print",
        prompt,
        *(["--continue"] if goes_on else []),
    ], environment


run_agent("Messages", ["Read"], command, reads_images=True)


@feature("Messages", "chat", "43")
def _() -> str:
    """Runs an unscripted prompt that the tiny model understands."""
    words, environment = command(SUM, False, BASE_URL)
    brief = [*words, "--system-prompt", "You are brief.", "--tools", "Read"]
    return run((brief, environment), Path(os.environ["HOME"]))
