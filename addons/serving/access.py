"""Who may send requests: clients with the key or, where there is none, programs, and web pages of
this server and this machine. A browser sends requests for any page that its user looks at."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import Request

from .schemas import ApiError


@dataclass(frozen=True)
class Access:
    """`api_key`: what clients must send, if anything. `host`: the name of --host. `local`: the
    server listens on a loopback address."""

    api_key: str | None
    host: str
    local: bool

    def check_key(self, request: Request) -> None:
        """Raises ApiError without the right key."""
        if self.api_key is None:
            return
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self.api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                code="invalid_api_key",
            )

    async def check_page(self, request: Request) -> None:
        """Raises ApiError for a request that a page of another site makes a browser send, which
        cannot know a key: with that page as Origin, or with a Host that its owner's name server
        has pointed here."""
        if self.api_key is not None:
            return
        host = request.headers.get("host")
        origin = request.headers.get("origin")
        if (
            self.local
            and host is not None
            and name_of(host) != self.host.lower()
            and not is_loopback(name_of(host))
        ):
            raise ApiError(
                403,
                f"Host {host[:100]}: without --api-key the server answers to localhost, loopback "
                "addresses and the name of --host",
                code="host_not_allowed",
            )
        if origin is not None:
            host_of_origin = origin.partition("://")[2]
            if host_of_origin != host and not is_loopback(name_of(host_of_origin)):
                raise ApiError(
                    403,
                    f"Origin {origin[:100]}: without --api-key the server answers to its own page "
                    "and to pages of this machine",
                    code="origin_not_allowed",
                )


def check_content_type(request: Request) -> None:
    """Raises ApiError unless the body is JSON: a browser asks before it sends that to another
    site."""
    content_type = request.headers.get("content-type")
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        named = "no Content-Type" if content_type is None else f"Content-Type {content_type[:100]}"
        raise ApiError(
            415,
            f"{named}: must be application/json (curl: -H 'Content-Type: application/json')",
            code="content_type_not_json",
        )


def name_of(address: str) -> str:
    """Of `name:port`, where an IPv6 address has brackets; empty if it is neither."""
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether this name or address is that of the machine itself for every resolver."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
