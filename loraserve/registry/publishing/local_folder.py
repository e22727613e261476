"""Folders of this machine that a request may name, below the one that the operator allows.

A path in a request is taken apart, and each of its folders is opened in the one before, so that
neither ``..`` nor a symbolic link leads out of the allowed folder, also while the folders change.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from adapters_store.files import CHUNK_BYTES, storage_errors
from loraserve.adapter_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILES, find_weights, holds_config, shard_names
from loraserve.adapters.extra_files import FILE_NAMES, MAX_BYTES, ExtraFiles, with_tokenizer
from loraserve.errors import AdapterFormatError, InvalidRequest, NotFound, PermissionDenied
from loraserve.limits import LIMITS
from loraserve.registry.uploads.staging import WeightsWriter
from loraserve.tokenizer_identity import TOKENIZER_FILES

TENANT = "{tenant}"
"""Part of the allowed folder's path that stands for the name of the request's tenant."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for its writer
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LocalFolders:
    """Reads adapters below one folder.

    Args:
        root: the folder, maybe with `TENANT` in it; None: nothing may be read.
    """

    def __init__(self, root: str | None) -> None:
        self.root = root
        """The folder, from the next read on."""

    def read(self, path: str, tenant_name: str, weights: WeightsWriter) -> tuple[bytes, ExtraFiles]:
        """Give the weights below `path` to `weights`, piece by piece; return the other files.

        They are the config and the extra files that are there.

        It blocks, so call it on a thread.

        Args:
            path: absolute, or below the allowed folder; that of a GGUF file too, which is read
                alone.

        Raises:
            PermissionDenied: no folder is allowed, or the path isn't below it.
            InvalidRequest: the path can't be one.
            NotFound: there is no such folder, or a symbolic link is on the way.
            AdapterFormatError: the folder has no adapter in the form that is read, or a too large
                one.
            StorageError: a file can't be read.
        """
        folder, file = self._open(path, tenant_name)
        try:
            found = os.listdir(folder) if file is None else [file]
            config = bytearray()
            name = find_weights(found) or WEIGHTS_FILES[0]
            if not holds_config(name):
                _read(folder, CONFIG_FILE, LIMITS.max_adapter_config_bytes, config.extend)
            extras: dict[str, bytes] = {}
            tokenizer: dict[str, bytes] = {}
            for part in FILE_NAMES:
                if FILE_NAMES[part] in found:
                    data = bytearray()
                    _read(folder, FILE_NAMES[part], MAX_BYTES[part], data.extend)
                    extras[part] = bytes(data)
            for file in TOKENIZER_FILES:
                if file in found:
                    data = bytearray()
                    _read(folder, file, TOKENIZER_FILES[file], data.extend)
                    tokenizer[file] = bytes(data)
            index = _read_weights(folder, name, weights)
        finally:
            os.close(folder)
        return bytes(config), replace(with_tokenizer(ExtraFiles.read(extras), tokenizer), index=index)

    def _open(self, path: str, tenant_name: str) -> tuple[int, str | None]:
        """Open the folder of this path, or that of the file of this path, which is named then."""
        if self.root is None:
            raise PermissionDenied(
                "This server reads no adapters from its own folders.",
                hint="The server's operator allows a folder with: --lora-dir DIR. Or upload the adapter: "
                "loraserve adapter push.",
            )
        if "\0" in path or not path or len(os.fsencode(path)) > LIMITS.max_lora_path_bytes:
            raise InvalidRequest("lora_path isn't a path.", param="lora_path")
        root = os.path.abspath(self.root.replace(TENANT, tenant_name))
        parts = _below(PurePosixPath(path), root)
        try:
            if parts and holds_config(parts[-1]):
                folder = _open_below(root, parts[:-1])
                if _is_file(folder, parts[-1]):
                    return folder, parts[-1]
                os.close(folder)
            return _open_below(root, parts), None
        except OSError as error:
            raise NotFound(
                "There is no folder at lora_path on this server.",
                hint="It must be below the server's --lora-dir, with no symbolic link on the way.",
            ) from error


def _open_below(root: str, parts: Sequence[str]) -> int:
    """Open a folder component by component, and return its descriptor.

    Raises:
        OSError: one isn't there, or is a symbolic link.
    """
    folder = os.open(root, _FOLDER_FLAGS)
    for part in parts:
        parent = folder
        try:
            folder = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    return folder


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _below(path: PurePosixPath, root: str) -> tuple[str, ...]:
    """Split the path below `root` into its components.

    Raises:
        PermissionDenied: it isn't below it.
    """
    if path.is_absolute():
        for known in (PurePosixPath(root), PurePosixPath(os.path.realpath(root))):
            if path.is_relative_to(known):
                path = path.relative_to(known)
                break
    if path.is_absolute() or ".." in path.parts:
        raise PermissionDenied(
            "lora_path isn't below the folder that this server reads adapters from.",
            hint="The server's operator sets it with: --lora-dir DIR.",
        )
    return path.parts


def _read_weights(folder: int, name: str, weights: WeightsWriter) -> bytes | None:
    """Write the weights, and return the index of their files if there are several."""
    if name != INDEX_FILE:
        _read(folder, name, LIMITS.max_upload_bytes, weights.write)
        return None
    index = bytearray()
    _read(folder, name, LIMITS.max_adapter_header_bytes, index.extend)
    num_bytes = 0

    def write(piece: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(piece)
        if num_bytes > LIMITS.max_upload_bytes:
            raise AdapterFormatError(f"The weights in lora_path exceed the limit of {LIMITS.max_upload_bytes} bytes.")
        weights.write(piece)

    for number, shard in enumerate(shard_names(bytes(index))):
        if number:
            weights.begin_file()
        _read(folder, shard, LIMITS.max_upload_bytes, write)
    return bytes(index)


def _read(folder: int, name: str, max_bytes: int, write: Callable[[bytes], object]) -> None:
    try:
        fd = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        raise AdapterFormatError(
            f"lora_path has no file {name}.", hint="Expected a folder as PEFT's save_pretrained writes it."
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterFormatError(f"{name} in lora_path isn't a regular file.")
        # the file may grow while it is read
        num_bytes = 0
        while True:
            with storage_errors(f"{name} in lora_path can't be read"):
                piece = os.read(fd, CHUNK_BYTES)
            num_bytes += len(piece)
            if max(num_bytes, status.st_size) > max_bytes:
                raise AdapterFormatError(f"{name} in lora_path exceeds the limit of {max_bytes} bytes.")
            if not piece:
                return
            write(piece)
    finally:
        os.close(fd)
