"""Sources of pulls: a repository of the hub or a folder of a bucket, if the operator allows it."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Protocol
from urllib.request import getproxies, proxy_bypass

import httpx2

from adapters_store import bucket_of
from loraserve.errors import (
    AdapterFormatError,
    BlobNotFound,
    ConfigError,
    InvalidRequest,
    PermissionDenied,
    StorageError,
    UnsupportedParameter,
)
from loraserve.hub import HubAddress, is_hub

_MAX_REDIRECTS = 8
_TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
_EXPECTED = "Expected hf://ORG/NAME, hf://ORG/NAME@REVISION or s3://BUCKET/PREFIX."


class Source(Protocol):
    """Files to pull. The methods block, so call them on a thread."""

    @property
    def address(self) -> str:
        """Address that the operator's patterns are compared with."""
        ...

    def open(self, file: str) -> tuple[int | None, Iterator[bytes]]:
        """Open the file: its size, if the source states it, and an iterator of its bytes.

        The iterator yields each piece as it arrives.

        Raises:
            NoSuchFile: there is no such file.
            StorageError: the source can't be reached or refuses; also raised while the bytes are
                read.
        """
        ...

    @property
    def revision(self) -> str | None:
        """Revision that was read, once a file was opened; None if the source has no revisions."""
        ...


def parse_source(text: str) -> Source:
    """Parse the address of a source.

    Raises:
        InvalidRequest: the text isn't such an address.
        UnsupportedParameter: the package that reads this kind of source isn't installed.
    """
    found = _hub_address(text)
    if found is not None:
        if find_spec("huggingface_hub") is None:
            raise UnsupportedParameter(
                "This server can't read the hub.",
                param="source",
                hint='On the server, run: pip install "loraserve[hub]"',
            )
        return _Repository(found.repo, found.revision)
    try:
        bucket, prefix = bucket_of(text)
    except ConfigError:
        raise InvalidRequest("The source can't be parsed.", param="source", hint=_EXPECTED) from None
    if find_spec("obstore") is None:
        raise UnsupportedParameter(
            "This server can't read buckets.", param="source", hint='On the server, run: pip install "loraserve[s3]"'
        )
    # normalized, because the operator's patterns are compared with it
    return _Folder(f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}")


def _hub_address(text: str) -> HubAddress | None:
    """Parse a whole repository of an organisation; None: the text is nothing of the hub's.

    Raises:
        InvalidRequest: it is another address there. Any account can propose what lies below refs/
            (refs/pr/N), so that is one.
    """
    if not is_hub(text):
        return None
    try:
        found = HubAddress.parse(text)
    except ConfigError as error:
        raise InvalidRequest("The source can't be parsed.", param="source", hint=_EXPECTED) from error
    is_proposed = found.revision is not None and re.match(r"refs(/|$)", found.revision) is not None
    if found.part is not None or "/" not in found.repo or is_proposed:
        raise InvalidRequest("The source can't be parsed.", param="source", hint=_EXPECTED)
    return found


def check_allowed(source: Source, patterns: Sequence[str]) -> None:
    """Check that a pattern of the operator matches the source.

    ``*`` in a pattern matches anything, slashes included.

    Raises:
        PermissionDenied
    """
    for pattern in patterns:
        if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), source.address):
            return
    raise PermissionDenied(
        f"Pulling from {source.address} isn't allowed on this server, for any key.",
        hint=f"The server's operator allows it with: --pull-allow {shlex.quote(source.address)}",
    )


@dataclass(slots=True)
class _Repository:
    """A repository of the hub (HF_ENDPOINT, HF_TOKEN).

    All files come from the commit of the first one.
    """

    repo: str
    wanted: str | None
    revision: str | None = None

    @property
    def address(self) -> str:
        return f"hf://{self.repo}"

    def open(self, file: str) -> tuple[int | None, Iterator[bytes]]:
        # an optional package, and a slow one to load
        from huggingface_hub import get_hf_file_metadata, get_token
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled

        try:
            found = get_hf_file_metadata(self._url(file))
        except EntryNotFoundError as error:
            raise _no_file(self.address, file) from error
        except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, OSError, ValueError) as error:
            raise StorageError(
                f"{self.address} can't be read: {type(error).__name__}.",
                hint="Check that it exists, and that it is public or HF_TOKEN is set on the server.",
            ) from error
        self.revision = self.revision or found.commit_hash
        token = get_token()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return found.size, _download(self._url(file), headers, self.address)

    def _url(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        revision = self.revision or self.wanted
        return hf_hub_url(self.repo, file, revision=revision, endpoint=os.environ.get("HF_ENDPOINT"))


@dataclass(frozen=True, slots=True)
class _Folder:
    """Objects below ``s3://bucket/prefix``, with the server's own credentials."""

    address: str
    revision: None = None

    def open(self, file: str) -> tuple[int | None, Iterator[bytes]]:
        from adapters_store.objects import open_object

        try:
            return open_object(*bucket_of(self.address), file)
        except BlobNotFound as error:
            raise _no_file(self.address, file) from error


def _download(url: str, headers: dict[str, str], address: str) -> Iterator[bytes]:
    try:
        # Encoded data could continue forever without yielding a byte.
        headers = {**headers, "Accept-Encoding": "identity"}
        with httpx2.Client(timeout=_TIMEOUT) as client, closing(_follow(client, url, headers, address)) as answer:
            answer.raise_for_status()
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise StorageError(
                    f"{address} can't be read: its answer has an encoding that wasn't requested ({encoding:.20})."
                )
            yield from answer.iter_raw()
    except httpx2.HTTPError as error:
        raise StorageError(f"{address} can't be read: {type(error).__name__}.", hint="Try again.") from error


def _follow(client: httpx2.Client, url: str, headers: dict[str, str], address: str) -> httpx2.Response:
    """Follow the redirects, which lead to no private address, to the answer at their end.

    The source's own host may be one: the operator named it.

    Raises:
        StorageError: they lead to one, to plain HTTP, or on and on.
    """
    source = target = httpx2.URL(url)
    for _ in range(_MAX_REDIRECTS):
        if _origin(target) == _origin(source):
            request = client.build_request("GET", target, headers=headers)
        else:
            request = _request_elsewhere(client, source, target, headers, address)
        answer = client.send(request, stream=True)
        if not answer.has_redirect_location:
            return answer
        answer.close()
        target = target.join(answer.headers["location"])
    raise StorageError(f"{address} can't be read: it redirects more than {_MAX_REDIRECTS} times.")


def _request_elsewhere(
    client: httpx2.Client, source: httpx2.URL, target: httpx2.URL, headers: dict[str, str], address: str
) -> httpx2.Request:
    """Build a request to another host than the source, without the source's token.

    It goes to the very address that was checked: a name that is looked up twice may have another
    one the second time.
    """
    if target.scheme not in ("https", source.scheme):
        raise StorageError(f"{address} can't be read: it redirects from {source.scheme} to {target.scheme:.16}.")
    place = _public_address(target, address)
    headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    if _proxy_of(target) is not None:
        # the proxy looks the name up, and may let through names alone
        return client.build_request("GET", target, headers=headers)
    return client.build_request(
        "GET",
        target.copy_with(host=place),
        headers={**headers, "Host": target.netloc.decode("ascii")},
        extensions={"sni_hostname": target.raw_host.decode("ascii")},
    )


def _public_address(target: httpx2.URL, address: str) -> str:
    """Look up the first address of a redirect's host, all of which are public."""
    try:
        found = socket.getaddrinfo(target.host, target.port or target.scheme, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StorageError(f"{address} can't be read: it redirects to a host that has no address.") from error
    places = [str(place[0]).partition("%")[0] for *_, place in found]
    for place in places:
        ip = ip_address(place)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if not ip.is_global or ip.is_multicast:
            raise StorageError(
                f"{address} can't be read: it redirects to an address that isn't public.",
                hint="If this server may read from there, name that host as the source (HF_ENDPOINT).",
            )
    return places[0]


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _proxy_of(url: httpx2.URL) -> str | None:
    """Look up the proxy that the environment names for a URL."""
    if proxy_bypass(url.host):
        return None
    proxies = getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


class NoSuchFile(AdapterFormatError):
    """The source has no file of this name, which may be an extra one."""


def _no_file(address: str, file: str) -> NoSuchFile:
    return NoSuchFile(f"{address} has no file {file}.", hint="Expected a PEFT adapter saved as safetensors.")
