"""Certificate files are checked before they are used, and wrong ones change nothing."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from tls_files import write_certificate

from loraserve.api.http.tls import TlsFiles
from loraserve.errors import ConfigError


def test_a_chain_and_its_key_may_be_one_file(tmp_path: Path) -> None:
    write_certificate(tmp_path / "a.pem", tmp_path / "a.key")
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "a.key").read_bytes() + (tmp_path / "a.pem").read_bytes())
    assert TlsFiles(both, None).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_wrong_files_are_refused_by_name_at_a_start_and_at_a_reload(tmp_path: Path, subtests: Any) -> None:
    good, key = tmp_path / "good.pem", tmp_path / "good.key"
    write_certificate(good, key)
    write_certificate(tmp_path / "other.pem", tmp_path / "other.key")
    write_certificate(tmp_path / "locked.pem", tmp_path / "locked.key", passphrase=b"sesame")
    (tmp_path / "empty.pem").write_bytes(b"")
    (tmp_path / "cut.pem").write_bytes(good.read_bytes()[:200])
    (tmp_path / "binary.pem").write_bytes(bytes(range(256)) * 1000)
    files = TlsFiles(good, key)
    for certfile, keyfile, words in (
        ("absent.pem", "good.key", "--ssl-certfile .*absent.pem can't be read: No such file"),
        ("good.pem", "absent.key", "--ssl-keyfile .*absent.key can't be read: No such file"),
        (".", "good.key", "--ssl-certfile .* can't be read: Is a directory"),
        ("good.pem", "other.key", "key values mismatch"),
        ("good.pem", None, "can't be used"),
        ("empty.pem", "good.key", "can't be used"),
        ("cut.pem", "good.key", "can't be used"),
        ("binary.pem", "good.key", "can't be used"),
        ("good.key", "good.key", "can't be used"),
        ("locked.pem", "locked.key", "has a passphrase"),
    ):
        with subtests.test(f"{certfile} {keyfile}"):
            for read in (TlsFiles, files.reload):
                with pytest.raises(ConfigError, match=words):
                    read(tmp_path / certfile, None if keyfile is None else tmp_path / keyfile)
