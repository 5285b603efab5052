"""Who may see the pages: a token where others can reach them, a check of the Host header where only this machine can.

On the loopback address a page of another site could make the browser ask this server under that site's name (DNS
rebinding), so only this machine's own names are answered. Elsewhere, and where runs can be controlled, each request
needs the token: from the printed address once, and from a cookie after that. What changes a run also needs a second
secret in a header, which only our own page can read, and the browser's word that our own page asks.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CONTROL_HEADER", "Access", "GuardedApp", "is_loopback"]

TOKEN_BYTES = 24
CONTROL_HEADER = "x-paceline-control"
QUERY = "token"
COOKIE_S = 30 * 24 * 3600
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
NEEDS_TOKEN = (
    "This page needs the token of its server. Open the address that `paceline ui` has printed: it ends in ?token=...\n"
)


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """What a request has to bring along. `token` is None where none is needed."""

    def __init__(self, *, needs_token: bool, is_local: bool, port: int) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES) if needs_token else None
        self.cookie = f"paceline_ui_{port}"  # cookies of all ports of a host are in one jar
        self._is_local = is_local
        self._secret = secrets.token_bytes(32)

    def control_secret(self) -> str:
        """What a request that changes a run has in `CONTROL_HEADER`."""
        return hmac.new(self._secret, b"control", hashlib.sha256).hexdigest()

    def refusal(self, headers: Mapping[str, str], query: str, path: str) -> Response | None:
        """Return the answer to a request that may not pass; None: it may. A token in the address becomes a cookie."""
        if self._is_local and _host_name(headers.get("host", "")) not in LOCAL_NAMES:
            return PlainTextResponse("This server answers only to this machine's own names.\n", status_code=421)
        if self.token is None:
            return None
        words = parse_qsl(query, keep_blank_values=True)
        given = next((value for name, value in words if name == QUERY), None)
        if given is not None and self._is_token(given):
            return self._enter(path, urlencode([one for one in words if one[0] != QUERY]))
        if self._is_token(_cookie(headers.get("cookie", ""), self.cookie)):
            return None
        return PlainTextResponse(NEEDS_TOKEN, status_code=401)

    def may_control(self, headers: Mapping[str, str]) -> bool:
        """Whether a request that changes a run comes from our own page."""
        origin = headers.get("origin")
        is_own = origin is None or urlsplit(origin).netloc == headers.get("host")
        given = headers.get(CONTROL_HEADER, "")
        return is_own and hmac.compare_digest(given.encode(), self.control_secret().encode())

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _enter(self, path: str, query: str) -> Response:
        """Keep the token as a cookie, and have the browser forget it as a part of the address."""
        target = "/" + path.lstrip("/\\")  # never another host
        answer = RedirectResponse(f"{target}?{query}" if query else target, status_code=303)
        answer.set_cookie(self.cookie, self.token or "", max_age=COOKIE_S, httponly=True, samesite="strict", path="/")
        return answer


class GuardedApp:
    """An ASGI application whose requests have passed `Access`, and whose answers have the headers above."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets
            return
        query = scope["query_string"].decode("latin-1")
        refused = self._access.refusal(Headers(scope=scope), query, scope["path"])

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (refused or self._app)(scope, receive, with_headers)


def _host_name(host: str) -> str:
    """The name in a Host header, without its port; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""
