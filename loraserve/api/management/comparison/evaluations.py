"""Keep results of versions' evaluations on files of data, and list them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import answer, rendered, respond
from loraserve.api.services import services_of
from loraserve.contract.adapter import Evaluation
from loraserve.contract.result import Page
from loraserve.limits import LIMITS
from loraserve.registry.catalog.evaluations import (
    MAX_DATA_NAME_LENGTH,
    MAX_LINES,
    MAX_SETTING_LENGTH,
    MeasuredEvaluation,
)
from loraserve.registry.records import EvaluationRecord
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix=f"/adapters/{NAME}/versions/{{number}}/evaluations")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)

_Metrics = dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class EvaluationBody(Body):
    """Result of an evaluation that a client ran."""

    data_name: str = Field(min_length=1, max_length=MAX_DATA_NAME_LENGTH)
    """Name of the file of data, for people."""
    num_lines: int = Field(ge=1, le=MAX_LINES)
    metrics: _Metrics = Field(min_length=1, max_length=LIMITS.max_evaluation_metrics)
    """Values by metric, of which more is better."""
    base_metrics: _Metrics = Field(default={}, max_length=LIMITS.max_evaluation_metrics)
    """Values of the base in the same run."""
    settings: dict[str, Annotated[str, Field(max_length=MAX_SETTING_LENGTH)]] = Field(
        default={}, max_length=LIMITS.max_evaluation_settings
    )
    """Settings of the run on which its metrics depend."""


@router.get("", response_model=Page[Evaluation])
async def list_evaluations(
    name: str,
    number: int,
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the version's evaluations, newest first."""
    evaluations = services_of(request).registry.evaluations
    page = await evaluations.list(caller.tenant, name, number, limit=limit, cursor=cursor)
    return answer(request, page_of(page, _evaluation))


@router.put("/{sha256}", response_model=Evaluation)
async def put_evaluation(
    name: str,
    number: int,
    sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")],
    request: Request,
    caller: Caller = Depends(_writer),
) -> Response:
    """Keep the result of the version's evaluation on the file of data with this SHA-256.

    It takes the place of an earlier one on the same data. 201 if there was none.
    """
    body = await read_body(request, EvaluationBody)
    measured = MeasuredEvaluation(
        data_sha256=sha256,
        data_name=body.data_name,
        num_lines=body.num_lines,
        metrics=body.metrics,
        base_metrics=body.base_metrics,
        settings=body.settings,
    )
    record, is_new = await services_of(request).registry.evaluations.put(
        caller.tenant, name, number, measured, actor=caller.key_id
    )
    return respond(rendered(_evaluation(record), status=201 if is_new else 200))


def _evaluation(record: EvaluationRecord) -> Evaluation:
    return resource_of(Evaluation, record)
