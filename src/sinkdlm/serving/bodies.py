"""Parse the bodies of requests, cheaply enough for the event loop.

Numbers cost json.loads three times what they cost jiter. A million bytes of empty lists or objects cost either parser up to half
a second, and no request can hold so many: they are counted first. Knows no field.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from sinkdlm.serving.schemas import ignored

# Beyond any valid request: 1024 messages with their parts and empty fields (schemas.py).
_MOST_STRINGS, _MOST_CONTAINERS = 1 << 15, 1 << 13


def parse(body: bytes) -> Any:
    """Raise ValueError where it is no JSON, or holds too much. Lone surrogates are no JSON either."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    if plain.count(b'"') > 2 * _MOST_STRINGS:
        raise ValueError(f"more than {_MOST_STRINGS} strings")
    outside = b"".join(plain.split(b'"')[::2])  # of all strings: a prompt may be full of brackets
    if outside.count(b"[") + outside.count(b"{") > _MOST_CONTAINERS:
        raise ValueError(f"more than {_MOST_CONTAINERS} lists and objects")
    return from_json(body, cache_strings=False)  # what clients send is not kept


class _Request(Request):
    async def json(self) -> Any:
        try:
            return parse(await self.body())
        except ValueError as failure:
            raise HTTPException(400, f"the body cannot be read as JSON: {failure}") from None


class Route(APIRoute):
    """A route that parses its body here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            ignored.set([] if request.app.state.site.settings.lenient else None)
            return await handle(_Request(request.scope, request.receive))

        return read
