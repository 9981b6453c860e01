"""The page over HTTP: `GET /` for browsers, the files that it loads, and the numbers of its live
view.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.page.files import FOLDER, INDEX, PREFIX, StaticFile, file_names
from penstock.serve.page.live import LiveRoute
from penstock.serve.state import ServerState


def routes(state: ServerState) -> list[Route]:
    """These come before the health routes: a client that asks for HTML gets the page, others the
    health.
    """
    live = Route("/live", LiveRoute(state).stream)
    if not state.config.page:
        return [live]
    files = {name: StaticFile.read(FOLDER / name) for name in file_names()}

    async def send_file(request: Request) -> Response:
        found = files.get(request.path_params["file"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    async def send_index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return files[INDEX].answer(request)
        return Response("Penstock is running", media_type="text/plain", headers={"vary": "accept"})

    return [Route("/", send_index), Route(f"{PREFIX}{{file:path}}", send_file), live]
