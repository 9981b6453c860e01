from agent import executable, run_agent
from report import API_KEY, MODEL


def command(prompt: str, goes_on: bool, url: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": API_KEY,
        "OPENAI_MODEL": MODEL,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "64",
    }
    words = ["--auth-type", "openai", "--yolo", *(["--continue"] if goes_on else []), "-p", prompt]
    return [executable("qwen"), *words], environment


run_agent("chat completions", ["read_file"], command)
