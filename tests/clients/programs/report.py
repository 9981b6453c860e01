"""What every program needs: the server's address, questions the tiny model can answer, one
report.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ["BASE_URL"]  # without /v1
MODEL = os.environ["MODEL"]
API_KEY = os.environ["API_KEY"]

SUM = "What is 17 + 26? Reply with just the number."
NAME, ASK_NAME = "My name is Alice.", "What is my name?"
WEATHER = "What is the weather in Oslo?"
WEATHER_RESULT = {"temperature": 7, "sky": "cloudy"}
WEATHER_TOLD = "7 degrees and cloudy in Oslo"
WEATHER_ABOUT = "Get the current weather in a city."
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    assert city == "Oslo", city
    return json.dumps(WEATHER_RESULT)


def feature(api: str, name: str, expected: str = "") -> Callable[[Callable[[], Any]], None]:
    """Runs the function at once; what it returns must contain `expected`."""

    def run(function: Callable[[], Any]) -> None:
        try:
            seen = function()
            if inspect.iscoroutine(seen):
                seen = asyncio.run(seen)
            seen = str(seen)
            report(api, name, bool(seen) and expected in seen, seen)
        except BaseException as error:  # SystemExit too: the other features still run
            report(api, name, False, f"{type(error).__name__}: {error}")

    return run


def report(api: str, name: str, ok: bool, detail: str) -> None:
    print(
        json.dumps(
            {"api": api, "feature": name, "ok": ok, "detail": " ".join(detail.split())[:300]}
        ),
        flush=True,
    )
