"""Scopes of routes.

Every route declares a scope or that it is open; the application doesn't start otherwise.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts

from loraserve.api.services import services_of
from loraserve.errors import AuthenticationError, ConfigError, InvalidRequest, PermissionDenied
from loraserve.tenancy.identity import keys
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.limits.shares import OPERATOR, Claim, tenant_holder

INFERENCE = "inference"
ADAPTERS_READ = "adapters:read"
ADAPTERS_WRITE = "adapters:write"
ADMIN = "admin"
METRICS_READ = keys.METRICS_SCOPE
OPERATOR_READ = keys.OPERATOR_READ
KEYS_WRITE = keys.KEYS_WRITE
SCOPES = frozenset({INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE, KEYS_WRITE, ADMIN, METRICS_READ, OPERATOR_READ})

GIVEN_CALLER, COLLECTED_USAGE = "loraserve.caller", "loraserve.usage"
"""Entries of the scope of a request that the server makes itself: in whose name, and what takes its
usage. No client can set them: a connection's scope has no such entries.
"""
_LOCAL_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_MAX_KEY_BYTES = 512
_MARK = "__loraserve_scope__"
_OPEN = "open"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
CallerDependency = Callable[[Request], Awaitable[Caller]]


def open(endpoint: Endpoint) -> Endpoint:
    """Mark a route as open: it needs no key."""
    setattr(endpoint, _MARK, _OPEN)
    return endpoint


def require(scope: str, *, is_tenants_own: bool = False) -> CallerDependency:
    """Build a dependency that returns the caller, once its key is valid and has `scope`.

    An admin key has every scope, and acts for the tenant of ``/t/{tenant}`` or of the header
    ``X-Tenant``, as a key with the role ``operator:read`` does for what it may read.

    Args:
        is_tenants_own: whether the answer has what a tenant alone, or an admin, may have: the role
            ``operator:read`` doesn't open it.

    Raises (when called):
        AuthenticationError: no key, or a bad one; not with ``--no-auth``.
        PermissionDenied: the key doesn't have the scope, or another site's page needs a key.
        TenantNotFound: the path or the header names a tenant that isn't the key's.
        InvalidRequest: an admin names two tenants.
        RateLimited: as many of the tenant's requests are being answered as its share is, or it has
            used its rate of management requests.
        Overloaded: no more requests are answered.
    """
    if scope not in SCOPES:
        raise ConfigError(f"The scope {scope!r} doesn't exist; expected one of {', '.join(sorted(SCOPES))}.")

    async def authenticate(request: Request) -> Caller:
        authenticator = services_of(request).authenticator
        claim: Claim = request.state.claim
        caller: Caller | None = request.scope.get(GIVEN_CALLER)
        if caller is None:
            caller = await _caller_of(request, claim.holder.name)
        if not caller.is_admin and scope not in caller.scopes:
            raise PermissionDenied(f"This key doesn't have the scope {scope!r}.", hint=_who_has(scope, caller))
        if is_tenants_own and caller.is_operator and not caller.is_admin:
            raise PermissionDenied(
                "A key with the role operator:read doesn't open tenants' files.", hint="Use a key of the tenant."
            )
        in_path = request.path_params.get("tenant") if _is_tenant_path(request) else None
        in_header = request.headers.get("x-tenant")
        for tenant in (in_path, in_header):
            if tenant is not None:
                caller = await authenticator.act_for(caller, tenant)
        if None not in (in_path, in_header) and in_path != in_header:
            raise InvalidRequest(
                "The path and the header X-Tenant name different tenants.",
                hint="Name the tenant to act for in one of them only.",
            )
        request.state.caller = caller
        # a flood of the tenant that its key is of mustn't end the operator's scrapes
        is_operators = caller.is_operator or scope == METRICS_READ
        holder = OPERATOR if is_operators else tenant_holder(caller.tenant, caller.key_id)
        claim.prove(holder, is_management=scope != INFERENCE)
        if scope != INFERENCE and not is_operators:
            services = services_of(request)
            services.admissions.enter_management(caller, services.settings.management_requests_per_minute or None)
        return caller

    setattr(authenticate, _MARK, scope)
    return authenticate


async def _caller_of(request: Request, holder: str) -> Caller:
    """Find the caller by its key; with ``--no-auth``, one without a valid key is an admin."""
    services = services_of(request)
    try:
        return await services.authenticator.authenticate(bearer_key(request), holder=holder)
    except AuthenticationError:
        if services.settings.auth:
            raise
    _check_is_local(request, services.settings.cors_allow_origins)
    return await services.authenticator.without_key()


def _check_is_local(request: Request, origins: Sequence[str]) -> None:
    """Check that no other site's page sent the request: a browser on this machine passes it on.

    Such a page reaches this server under a name of its own (DNS rebinding), or names its origin.

    Raises:
        PermissionDenied: one did.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # of what a page embeds, browsers name no origin, but its site
    is_embedded = origin is None and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if _LOCAL_HOST.fullmatch(host) is None:
        raise PermissionDenied(
            "Without a key (--no-auth), requests may name this server 127.0.0.1 or localhost alone; this one's Host "
            "header has another name.",
            hint="Send it to http://127.0.0.1, or send a key.",
        )
    if is_embedded or (origin is not None and origin not in (f"http://{host}", f"https://{host}", *origins)):
        raise PermissionDenied(
            "Without a key (--no-auth), web pages of other origins may send no requests.",
            hint="Send a key, or allow the page's origin with --cors-allow-origins.",
        )


def _who_has(scope: str, caller: Caller) -> str:
    """Explain where a key with the scope comes from."""
    if scope == ADMIN:
        return "Use an admin key: the server's LORASERVE_ADMIN_KEY, or the one that its first start printed."
    if scope == OPERATOR_READ:
        return "Use an admin key, or one that an admin creates with: loraserve admin-key create --role operator:read"
    # without --scope a key has all of a tenant's, which what is done next may need too
    choice = f" --scope {scope}" if scope == METRICS_READ else ""
    if scope == KEYS_WRITE:
        # alone it would make keys that open nothing
        choice = "".join(f" --scope {one}" for one in sorted(keys.TENANT_SCOPES))
    return f"An admin creates a key that has it with: loraserve key create --tenant {caller.tenant_name}{choice}"


def bearer_key(request: Request) -> str:
    """Read the secret of ``Authorization: Bearer …``, or the password of ``Basic …``.

    Without that header, the secret of Anthropic's ``x-api-key`` or Azure's ``api-key``: together
    with it, it may be a gateway's.
    Clients that send no key of their own, such as trainers, send as Basic what their URL holds:
    ``http://x:KEY@host``.

    Raises:
        AuthenticationError: there is none, or it can't be a key.
    """
    value = request.headers.get("authorization")
    if value is None:
        name = "x-api-key" if "x-api-key" in request.headers else "api-key"
        secret = request.headers.get(name, "").strip()
        if not secret:
            raise AuthenticationError("No API key was given.", hint="Send the header Authorization: Bearer sk-lora-…")
        if not _can_be_key(secret):
            raise AuthenticationError(f"The {name} header should be: sk-lora-…")
        return secret
    kind, _, secret = value.partition(" ")
    secret = secret.strip()
    if kind.lower() == "basic":
        kind, secret = "bearer", _password(secret)
    if kind.lower() != "bearer" or not _can_be_key(secret):
        raise AuthenticationError("The Authorization header should be: Bearer sk-lora-…")
    return secret


def _can_be_key(secret: str) -> bool:
    return 0 < len(secret) <= _MAX_KEY_BYTES and secret.isascii()


def _password(credentials: str) -> str:
    """Decode the password of Basic credentials; an empty one if they aren't such."""
    try:
        _, _, password = base64.b64decode(credentials, validate=True).decode("ascii").partition(":")
    except (binascii.Error, ValueError):
        return ""
    return password


def _is_tenant_path(request: Request) -> bool:
    # Management has resources called /tenants/{tenant}; only the prefix /t/{tenant} means "act
    # for".
    path: str = request.scope["path"]
    return path.startswith("/t/")


def audit(app: FastAPI) -> None:
    """Check that every route declares its scope, or that it is open.

    Raises:
        ConfigError: a route declares neither. The message names each.
    """
    bare = sorted({f"{sorted(methods)} {path}" for path, methods, scopes in declared_scopes(app) if not scopes})
    if bare:
        raise ConfigError(f"Routes declare no scope: {', '.join(bare)}.")


def declared_scopes(app: FastAPI) -> Iterator[tuple[str, frozenset[str], frozenset[str]]]:
    """(path, methods, scopes) of every route; ``open`` is among the scopes of an open one."""
    for context in iter_route_contexts(app.routes):
        dependant = getattr(context, "dependant", None)
        scopes = frozenset(_scopes_of(dependant)) if isinstance(dependant, Dependant) else frozenset()
        mark = getattr(context.endpoint, _MARK, None)
        if mark is not None:
            scopes |= {mark}
        yield context.path_format or "?", frozenset(context.methods or ()), scopes


def _scopes_of(dependant: Dependant) -> Iterator[str]:
    mark = getattr(dependant.call, _MARK, None)
    if mark is not None:
        yield mark
    for dependency in dependant.dependencies:
        yield from _scopes_of(dependency)
