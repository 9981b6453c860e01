from agent import executable, run_agent
from report import API_KEY, MODEL


def command(prompt: str, goes_on: bool, url: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": API_KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    }
    return [executable("claude"), "--print", prompt, *(["--continue"] if goes_on else [])], environment


run_agent("Messages", ["Read"], command)
