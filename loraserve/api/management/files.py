"""A version's files, as they were uploaded."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.adapters.extra_files import FILE_NAMES
from loraserve.api import scopes
from loraserve.api.http.blob_response import blob_response
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.responses import header_list, names_etag
from loraserve.api.services import services_of
from loraserve.errors import AdapterCorrupt, NotFound
from loraserve.registry.records import VersionRecord
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import Digest, VersionExtras

router = APIRouter(prefix="/adapters")

_reader = scopes.require(scopes.ADAPTERS_READ, is_tenants_own=True)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATE, DEFAULTS, TOKENIZER = (FILE_NAMES[part] for part in ("chat_template", "generation_config", "tokenizer"))
_MEDIA_TYPES = {
    CONFIG: "application/json",
    WEIGHTS: "application/octet-stream",
    TEMPLATE: "text/plain; charset=utf-8",
    DEFAULTS: "application/json",
    TOKENIZER: "application/json",
}


@router.get(f"/{NAME}/versions/{{number}}/files/{{file}}", response_model=None)
async def download_file(
    name: str, number: int, file: str, request: Request, caller: Caller = Depends(_reader)
) -> Response:
    """Send the file's bytes; its ETag is their SHA-256.

    Bytes are verified while they are read: the last piece of a corrupt file is never sent.
    """
    services = services_of(request)
    slots = services.registry.uploads.downloads
    version = await services.registry.get_version(caller.tenant, name, number)
    blobs = _blobs(version)
    if file not in blobs:
        raise NotFound("The version has no file of this name.", hint=f"Its files are {' and '.join(blobs)}.")
    blob = blobs[file]
    etag = f'"{blob}"'
    if names_etag(header_list(request, "if-none-match") or "", etag):
        return Response(status_code=304, headers={"ETag": etag})

    def damaged() -> AdapterCorrupt:
        services.registry.corruption.report(version.digest, blob)
        return AdapterCorrupt(
            "The stored bytes of this adapter version are damaged or missing.",
            digest=version.digest,
            blob=blob,
            hint="Push the same files again.",
        )

    headers = {"ETag": etag, "Content-Disposition": f'attachment; filename="{file}"', "Cache-Control": "private"}
    return await blob_response(
        services.store, slots, caller.tenant, blob, headers=headers, media_type=_MEDIA_TYPES[file], damaged=damaged
    )


def _blobs(version: VersionRecord) -> dict[str, Digest]:
    """Return the blobs of the version's files by their names."""
    extras = version.extras or VersionExtras()
    files = {TEMPLATE: extras.chat_template, DEFAULTS: extras.generation_config, TOKENIZER: extras.tokenizer}
    given = {name: file.blob for name, file in files.items() if file is not None}
    return {CONFIG: version.config_blob, WEIGHTS: version.weights_blob, **given}
