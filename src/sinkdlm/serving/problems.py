"""Turn every failure into an error in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sinkdlm.errors import ModelError, UserError
from sinkdlm.serving.engine import ClosedError, ExpiredError, QueueFullError
from sinkdlm.serving.schemas import UNKNOWN, ErrorBody

_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "queue_full"}
_LONGEST = 1000  # characters of a message
_RETRY = 5  # seconds after which another server may have taken over

# The errors of every route, for the schema.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
}


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # A client's own words come back here, and may not be valid UTF-8.
        message, param = (text and text[:_LONGEST].encode("utf-8", "replace").decode() for text in (str(self), self.param))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code or _CODES.get(self.status)}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def shutting_down() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down", retry_after=_RETRY)


def api_error(failure: BaseException) -> ApiError:
    """The error that a client gets. Of an internal failure it gets only the type; the log has the rest."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, RequestValidationError):
        return _invalid(failure)
    if isinstance(failure, ModelError):
        _log.error("a request failed: %s", failure)
        return ApiError(500, f"{failure}, as in sinkdlm serve --dtype float32", code="model_failed")
    if isinstance(failure, UserError):
        return ApiError(400, str(failure))
    if isinstance(failure, QueueFullError):
        return ApiError(429, f"{failure}; try again later", retry_after=failure.retry_after)
    if isinstance(failure, ClosedError):
        return shutting_down()
    if isinstance(failure, ExpiredError):
        return ApiError(504, str(failure), code="timeout")
    _log.error("a request failed", exc_info=failure)
    return ApiError(500, f"the server failed: {type(failure).__name__}", code="internal_error")


def _invalid(failure: RequestValidationError) -> ApiError:
    """The first mistake, by the name of its field."""
    errors = failure.errors()
    if not errors:
        return ApiError(400, "the body is not a JSON object")
    # A field of several types gives a mistake for each: an unknown field says most.
    first = next((error for error in errors if error["type"] == UNKNOWN), errors[0])
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "dict_type"):
        return ApiError(400, "the body is not a JSON object, or was sent without Content-Type: application/json")
    # For a field of several types the location also names the type, which is no field.
    kinds = ("str", "int", "list")
    place = [str(part) for part in first["loc"][1:] if isinstance(part, int) or (part.isidentifier() and part not in kinds)]
    if first["type"] == UNKNOWN:
        place.append(first["ctx"]["field"])
    param = ".".join(place) or None
    return ApiError(400, f"{param or 'the request'}: {first['msg']}", param=param)


def register(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def _(request: Request, failure: HTTPException) -> JSONResponse:
        answer = ApiError(failure.status_code, f"{request.method} {request.url.path}: {failure.detail}").response()
        answer.headers.update(failure.headers or {})
        return answer

    async def fail(request: Request, failure: Exception) -> JSONResponse:
        return api_error(failure).response()

    for kind in (ApiError, RequestValidationError, UserError, QueueFullError, ClosedError, ExpiredError, Exception):
        app.add_exception_handler(kind, fail)
