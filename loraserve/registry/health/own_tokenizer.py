"""Comparison of an adapter's own tokenizer with the base's, before it becomes a version's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from loraserve.adapters.extra_files import FILE_NAMES, TOKENIZER, ExtraFiles
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported, ConfigError
from loraserve.limits import LIMITS
from loraserve.registry.health.checks import PASSED, WARNED
from loraserve.tokenizer_identity import CONFIG_FILE, TokenizerSummary
from loraserve.types import BaseSpec

_NUM_SHOWN = 4
_CURE = (
    "Train with the base's tokenizer, and add tokens behind its last one. If training used the base's own, remove "
    "the tokenizer's files from the adapter's folder."
)


class BaseTokenizer(Protocol):
    """The base's tokenizer, as it is compared."""

    @property
    def summary(self) -> TokenizerSummary | None:
        """Summary of it; None: its files can't be read."""
        ...

    def with_differences(self, summary: TokenizerSummary) -> object:
        """Try to make a version's tokenizer; raise ConfigError if it can't be made."""
        ...


GetTokenizer = Callable[[], BaseTokenizer | None]


def inspect_tokenizer(
    extras: ExtraFiles, tokenizer: BaseTokenizer | None, base: BaseSpec, *, is_strict: bool
) -> tuple[ExtraFiles, list[dict[str, Any]]]:
    """Reduce a version's extra files to what of its tokenizer differs, and check it.

    The template of ``tokenizer_config.json`` becomes the version's, where it isn't the base's and
    the version has no other. It may take a second: call it on a thread.

    Raises:
        AdapterBaseMismatch: it is another vocabulary than the base's; or it can't be compared, and
            the server is strict.
        AdapterUnsupported: no adapter has a row for a token, there are too many, or there are chat
            templates by other names.
        AdapterFormatError: the added tokens can't have their ids; or the template is too large.
    """
    own = extras.tokenizer
    if own is None:
        return extras, []
    known = None if tokenizer is None else tokenizer.summary
    if tokenizer is None or known is None:
        detail = "the adapter's tokenizer can't be compared: the base's can't be read. Texts become the base's tokens"
        if is_strict:
            raise AdapterBaseMismatch(
                f"{detail}. This server accepts adapters of its own base only (--strict-base).", hint=_CURE
            )
        return replace(extras, tokenizer=None), [_check(WARNED, detail)]
    conflict = own.conflict(known)
    if conflict is not None:
        raise AdapterBaseMismatch(f"The adapter's tokenizer isn't {base.id}'s: it {conflict}.", hint=_CURE)
    differences = own.reduced(known)
    _check_rows(differences, base)
    try:
        tokenizer.with_differences(differences)
    except ConfigError as error:
        raise AdapterFormatError(f"The adapter's tokenizer can't be used: {error.message}.", hint=_CURE) from None
    extras, template = _with_template(extras, own, known)
    kept = differences if differences.has_differences else None
    detail = _words(differences) if kept is not None else "the base's"
    unused = _unused(own, known)
    if unused and is_strict:
        raise AdapterBaseMismatch(
            f"The adapter's tokenizer isn't {base.id}'s: {'; '.join(unused)}. This server accepts adapters of its own "
            "base only (--strict-base).",
            hint=_CURE,
        )
    status = WARNED if unused else PASSED
    return replace(extras, tokenizer=kept), [_check(status, "; ".join((detail, *template, *unused)))]


def check_rows(tokenizer: TokenizerSummary | None, num_extra_rows: int, base: BaseSpec) -> None:
    """Check that a version's tokens and its rows beyond the base's belong together.

    Args:
        tokenizer: what the version's has of its own; None: nothing.
        num_extra_rows: rows that the adapter's embedding and head have beyond the base's.

    Raises:
        AdapterUnsupported: a token has no row.
        AdapterFormatError: there are such rows, and no token that has one.
    """
    added = () if tokenizer is None else tokenizer.added
    num_rows = base.vocab_size + num_extra_rows
    beyond = next((token for token in added if token.id >= num_rows), None)
    if beyond is not None:
        own = f", and the adapter {num_extra_rows:,} more" if num_extra_rows else ""
        raise AdapterUnsupported(
            f"The adapter's tokenizer has the token {beyond.content!r} with the id {beyond.id:,}; {base.id} has "
            f"{base.vocab_size:,} rows of embeddings{own}.",
            hint="Save the embedding and the head that were resized with resize_token_embeddings in the adapter "
            "(modules_to_save, or save_embedding_layers=True); or add as many tokens as the base has unused rows "
            "(its vocab_size less its tokens) and train them with trainable_token_indices.",
        )
    if num_extra_rows and not any(token.id >= base.vocab_size for token in added):
        raise AdapterFormatError(
            f"The adapter's embedding and head have {num_extra_rows:,} rows beyond the {base.vocab_size:,} of "
            f"{base.id}, and no tokenizer in its folder has a token for them.",
            hint="Save the tokenizer that it was trained with in the same folder (tokenizer.save_pretrained), or train "
            "it without resize_token_embeddings.",
        )


def _unused(own: TokenizerSummary, base: TokenizerSummary) -> list[str]:
    """Describe what of a tokenizer isn't used."""
    found = [
        f"it has a {name.replace('_', '-')} of its own with {what}, which isn't used: the base's is"
        for name, what in own.unserved_rules(base).items()
    ]
    if own.decoder and base.decoder and own.decoder != base.decoder:
        found.append("its rules for making text of tokens (the decoder) aren't the base's, which are used")
    return found


def _check(status: str, detail: str) -> dict[str, Any]:
    return {"name": TOKENIZER, "status": status, "detail": detail}


def _check_rows(differences: TokenizerSummary, base: BaseSpec) -> None:
    """Check that the tokens are neither too many nor too long, and have ids that a row may have."""
    most = LIMITS.max_added_token_bytes
    if len(differences.added) > LIMITS.max_added_tokens:
        raise AdapterUnsupported(
            f"The adapter's tokenizer has {len(differences.added):,} added tokens that the base's lacks; "
            f"at most {LIMITS.max_added_tokens:,} are served."
        )
    long = next((token for token in differences.added if len(token.content.encode("utf-8", "replace")) > most), None)
    if long is not None:
        raise AdapterUnsupported(
            f"The adapter's tokenizer has an added token of more than {most} bytes: {long.content[:40]!r}…"
        )
    most_rows = base.vocab_size + LIMITS.max_extra_rows
    far = next((token for token in differences.added if token.id >= most_rows), None)
    if far is not None:
        raise AdapterUnsupported(
            f"The adapter's tokenizer has the token {far.content!r} with the id {far.id:,}; {base.id} has "
            f"{base.vocab_size:,} rows of embeddings, and an adapter may have {LIMITS.max_extra_rows:,} more.",
            hint=_CURE,
        )


def _with_template(extras: ExtraFiles, own: TokenizerSummary, base: TokenizerSummary) -> tuple[ExtraFiles, list[str]]:
    """Add the template that a version has to the extra files; describe what was done with it."""
    templates, file = dict(own.chat_templates), FILE_NAMES["chat_template"]
    if not templates:
        return extras, []
    if extras.chat_template is not None:
        is_same = templates.get("default", "").encode() == extras.chat_template
        return extras, [] if is_same else [f"{file} is used, and not {CONFIG_FILE}'s template, as in transformers"]
    if templates == dict(base.chat_templates):
        return extras, [f"{CONFIG_FILE}'s template is the base's"]
    if set(templates) != {"default"}:
        raise AdapterUnsupported(
            f"{CONFIG_FILE} has the chat templates {', '.join(sorted(templates))}; a version has one.",
            hint=f"Save the one to use as {file} in the adapter's folder.",
        )
    data = templates["default"].encode("utf-8", "replace")
    if len(data) > LIMITS.max_chat_template_bytes:
        raise AdapterFormatError(
            f"{CONFIG_FILE}'s template exceeds the limit of {LIMITS.max_chat_template_bytes} bytes."
        )
    return replace(extras, chat_template=data), [f"{CONFIG_FILE}'s template is the version's"]


def _words(differences: TokenizerSummary) -> str:
    """Describe what a version's tokenizer has of its own."""
    found = []
    if differences.added:
        shown = ", ".join(repr(token.content) for token in differences.added[:_NUM_SHOWN])
        more = " …" if len(differences.added) > _NUM_SHOWN else ""
        found.append(f"added tokens of its own ({len(differences.added)}): {shown}{more}")
    found += [f"a {name.replace('_', '-')} of its own" for name in differences.parts]
    found += [f"{name} {token!r}" for name, token in differences.special.items()]
    found += [] if differences.add_bos is None else [f"add_bos_token {differences.add_bos}"]
    return f"the base's vocabulary, with {'; '.join(found)}"
