"""At the door of every path, of a syncer and of a shard: who asks, and what becomes of a request that is wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from atoll.logs import Named
from atoll.syncer.fragment_endpoints import SILENT_S, NoLinkError, error_response
from atoll.transport.auth import Access
from atoll.transport.identity import HEADER, IdentityMismatchError, Rejection, log_key
from atoll.transport.wire import WireError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guarded(Protocol):
    """The process whose paths they are."""

    access: Access
    refused: Counter[str]
    log: Named
    on_proved: Callable[[asyncio.BaseTransport | None], None]


def guard_of(host: Guarded) -> Any:
    """A middleware: whatever is wrong with a request closes that connection and is counted."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        turned = host.access.refusal(request)
        if turned is not None:
            answer = error_response(turned.status, turned.sentence)
            answer.headers[HEADER] = turned.sentence
            answer.force_close()  # another key is shown on another connection
            return answer
        host.on_proved(request.transport)
        try:
            return await handler(request)
        except WireError as error:
            turned = Rejection(error.code, 400, str(error))
            host.access.reject(turned, str(request.remote), f"{request.method} {request.path}", log_key(error.code))
            return error_response(400, str(error), error.code)
        except IdentityMismatchError as error:
            turned = Rejection(error.code, 403, str(error))
            host.access.reject(turned, str(request.remote), request.path, log_key(error.code))
            return error_response(403, str(error), error.code)
        except NoLinkError:
            return error_response(409, "the link that this belongs to is closed")
        except ConnectionError as error:
            host.log.info("%s %s from %s broke off: %s", request.method, request.path, request.remote, error)
            return error_response(400, "it broke off")  # nobody reads it
        except web.HTTPException:
            raise
        except TimeoutError:
            host.refused["silent"] += 1
            return error_response(408, f"nothing came for {SILENT_S:g} s")
        except Exception:
            host.log.exception("%s %s has failed", request.method, request.path)
            return error_response(500, "the syncer has failed on this request; its log says how")

    return guard
