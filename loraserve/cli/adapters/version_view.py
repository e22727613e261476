"""A version of an adapter as people are shown it, with its certificate and its evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from loraserve.cli.adapters.evaluation_view import evaluation_details, shown_evaluation
from loraserve.cli.output import Column, Output, first_line, size

if TYPE_CHECKING:
    from loraserve.contract.adapter import Certificate, Version

VERSION_COLUMNS = (
    Column("VERSION", "version"),
    Column("ALIASES", "aliases"),
    Column("STATE", "state", is_state=True),
    Column("PARITY", "verdict", is_state=True),
    Column("EVALUATION", lambda version: shown_evaluation(version.evaluation)),
    Column("RANK", "rank"),
    Column("SIZE", lambda version: size(version.size_bytes)),
    Column("MODULES", "target_modules"),
    Column("DIGEST", lambda version: version.digest[:12]),
    Column("TAGS", "tags", is_rare=True),
    Column("NOTES", lambda version: first_line(version.notes), is_rare=True),
    Column("CREATED", "created_at"),
)
VERSION_DETAILS = (
    Column("model", "model"),
    Column("aliases", "aliases"),
    Column("state", "state", is_state=True),
    Column("kind", lambda version: version.detail_of("format")),
    Column("read from", lambda version: version.detail_of("container")),
    Column("names", lambda version: version.detail_of("names")),
    Column("rank", "rank"),
    Column("size", lambda version: f"{size(version.size_bytes)} ({version.size_bytes} bytes)"),
    Column("modules", "target_modules"),
    Column("digest", "digest"),
    Column("base", "base_digest"),
    Column("files", lambda version: ", ".join(file.name for file in version.extra_files) or None),
    Column("tool parser", "tool_parser"),
    Column("reasoning", "reasoning_parser"),
    Column("template", lambda version: _variables(version)),
    Column("created", "created_at"),
    Column("by", "created_by"),
    Column("notes", "notes"),
    Column("tags", "tags"),
    Column("parity", lambda version: _parity(version), is_state=True),
)
CERTIFICATE_DETAILS = (
    Column("effect kept", lambda one: _effect(one)),
    Column("same answers", lambda one: _answers(one)),
    Column("divergence", lambda one: _divergence(one)),
    Column(
        "each module",
        lambda one: (
            f"off by at most {_number(one.module_difference)} of what it adds"
            if one.module_difference is not None
            else None
        ),
    ),
    Column("largest difference", lambda one: f"{_number(one.max_difference)} of {_number(one.tolerance)} allowed"),
    Column("mean difference", lambda one: _number(one.mean_difference)),
    Column("the base's own", lambda one: _number(one.base_difference)),
    Column("next codes", lambda one: f"{_number(one.base_spread)} rms on the base alone" if one.base_spread else None),
    Column("largest effect", lambda one: f"{_number(one.max_effect)} on a logit of the base"),
    Column("same token", lambda one: f"{_share(one.top1_agreement)} of {one.num_probe_tokens} positions"),
    Column("precision loss", lambda one: _share(one.precision_loss)),
    Column("verified in", lambda one: f"{_number(one.seconds)} s"),
    Column("holds for", lambda one: _subject(one)),
)


def _details(version: Version) -> list[Column]:
    """Build the lines that describe a version, its certificate and its evaluation."""
    certificate, evaluation = version.certificate, version.evaluation
    certified = [] if certificate is None else [(one.title, one.of(certificate)) for one in CERTIFICATE_DETAILS]
    evaluated = [] if evaluation is None else evaluation_details(evaluation)
    return [
        *VERSION_DETAILS,
        *(Column(f"  {title}", _fixed(found)) for title, found in certified if found != "-"),
        *(Column(title, _fixed(found)) for title, found in evaluated),
    ]


def _fixed(text: str) -> Callable[[object], str]:
    return lambda _: text


def _variables(version: Version) -> str | None:
    return json.dumps(version.chat_template_kwargs) if version.chat_template_kwargs else None


def _parity(version: Version) -> str | None:
    """Format the verdict, and the reason if it isn't passed."""
    if version.verdict in (None, "passed"):
        return version.verdict
    certificate = version.certificate
    why = version.detail_of("parity") if certificate is None else certificate.reason
    return f"{version.verdict}: {why}" if why else version.verdict


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "not finite" if value is None else f"{100 * value:.4g} %"


def _effect(one: Certificate) -> str | None:
    """Format what rounding the base leaves of the adapter's effect; why not, where not measured."""
    if one.effect_kept is None or one.min_effect_kept is None:
        return f"not measured: {one.rounding_note}" if one.rounding_note else None
    return f"{one.effect_kept:.0%} after rounding the base; {one.min_effect_kept:.0%} is expected"


def _answers(one: Certificate) -> str | None:
    if one.answer_agreement is None or one.base_agreement is None:
        return None
    return (
        f"{one.answer_agreement:.0%} of {one.num_answer_tokens} likeliest tokens stay; of the base alone,"
        f" {one.base_agreement:.0%}"
    )


def _divergence(one: Certificate) -> str | None:
    if one.answer_divergence is None or one.base_divergence is None:
        return None
    return f"{one.answer_divergence:.2g} nats from the float base; of the base alone, {one.base_divergence:.2g}"


def _subject(certificate: Certificate) -> str:
    """Format the base that a certificate holds for, and how it was computed."""
    if not certificate.base_digest:
        return "unknown (the certificate is older than this field)"
    how = f"{certificate.arithmetic} ({certificate.instructions}) on {certificate.device}"
    return f"base {certificate.base_digest[:12]}, quantization {certificate.quantization}, {how}"


def show_version(output: Output, version: Version) -> None:
    output.one(version, _details(version), name="model")
    for warning in version.warnings:
        output.note(f"Warning: {warning}.")
    if version.is_of_another_base:
        output.note(
            f"{version.model} was made for another base than this server's, and isn't served here. "
            f"Try: loraserve adapter verify {version.model} --rebase"
        )


def check_served(output: Output, version: Version) -> None:
    """Check that the version is served; scripts must not continue as if it were.

    Raises:
        typer.Exit: it isn't.
    """
    if version.is_of_another_base:
        raise typer.Exit(1)
    if version.is_quarantined:
        output.note(f"{version.model} is in quarantine: it isn't served, and no alias was moved to it.")
        raise typer.Exit(1)
