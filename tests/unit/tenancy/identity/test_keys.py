"""Secrets: random, checked, hashed."""

from __future__ import annotations

from loraserve.tenancy.identity.keys import hash_secret, is_well_formed, make_secret


def test_a_secret_holds_256_bits_and_a_checksum() -> None:
    secret = make_secret()
    assert secret.startswith("sk-lora-")
    assert len(secret) == len("sk-lora-") + 43 + 6
    assert is_well_formed(secret)
    assert make_secret(lambda n: b"\xff" * n) != make_secret(lambda n: b"\xfe" + b"\xff" * (n - 1))
    assert len({make_secret() for _ in range(100)}) == 100


def test_any_changed_letter_is_noticed() -> None:
    secret = make_secret(lambda n: bytes(range(n)))
    for place in range(len(secret)):
        other = "A" if secret[place] != "A" else "B"
        assert not is_well_formed(secret[:place] + other + secret[place + 1 :])
    for wrong in ("", "sk-lora-", secret[:-1], secret + "0", "é" * 57, secret.replace("sk", "\udc80k")):
        assert not is_well_formed(wrong)


def test_the_hash_needs_the_pepper() -> None:
    assert hash_secret("a", b"1") != hash_secret("a", b"2")
