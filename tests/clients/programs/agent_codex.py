import os
from pathlib import Path

from agent import executable, run_agent
from report import MODEL

CONFIG = """
model = "{model}"
model_provider = "penstock"
web_search = "disabled"
[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
env_key = "API_KEY"
wire_api = "responses"
[features]
multi_agent = false
"""


def command(prompt: str, goes_on: bool, url: str) -> tuple[list[str], dict[str, str]]:
    home = Path(os.environ["HOME"], "codex")
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=url))
    # Its permissions change with the second turn, so a developer message stands between the turns.
    mode = "read-only" if goes_on else "danger-full-access"
    flags = ["--skip-git-repo-check", "-c", f"sandbox_mode={mode}", "-c", "approval_policy=never"]
    words = ["resume", "--last", *flags, prompt] if goes_on else [*flags, prompt]
    return [executable("codex"), "exec", *words], {"CODEX_HOME": str(home)}


run_agent("Responses", ["exec_command", "shell_command", "shell"], command)
