"""Opens the page of a server in the browser of whoever runs the command."""

from __future__ import annotations

import threading
import webbrowser

from penstock.commands.console import print_note
from penstock.http_client import read_address


def open_page(url: str) -> threading.Thread:
    """Returns at once, with what tries it: a browser may take its time."""
    opening = threading.Thread(target=_open, args=(page_address(url),), daemon=True)
    opening.start()
    return opening


def page_address(url: str) -> str:
    """As a browser here reaches it: an address that stands for every interface is none."""
    address = read_address(url)
    host = address.hostname or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    path = address.path.rstrip("/").removesuffix("/v1")
    return f"{address.scheme}://{host}{f':{address.port}' if address.port else ''}{path}/"


def _open(address: str) -> None:
    try:
        is_open = webbrowser.open(address)
    except webbrowser.Error:
        is_open = False
    if not is_open:
        print_note(f"No browser could be started here; open {address} in one.")
