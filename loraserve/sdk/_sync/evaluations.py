# Generated from loraserve/sdk/_async/evaluations.py by `make sdk`: don't edit.
"""`client.evaluations`: results of versions' evaluations on files of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loraserve.contract.adapter import Evaluation
from loraserve.sdk._sync.paging import all_rows
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, read_into, segment


class Evaluations:
    """Keep results of evaluations with versions.

    The server runs none: ``loraserve adapter eval`` does, or a program of your own.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def put(
        self,
        name: str,
        version: int,
        data_sha256: str,
        *,
        data_name: str,
        num_lines: int,
        metrics: Mapping[str, float],
        base_metrics: Mapping[str, float] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Evaluation:
        """Keep a result in the place of the version's earlier one on the same data.

        The newest is `Version.evaluation`, and ``adapters.set_alias(…, if_better=METRIC)`` compares
        versions by them.

        Args:
            data_sha256: SHA-256 of the file of data, in hex.
            data_name: name of the file, for people.
            num_lines: lines of the file.
            metrics: values by metric, of which more is better: the loss is sent as its negative.
            base_metrics: values of the base in the same run; None: it wasn't evaluated.
            settings: settings of the run on which the metrics depend, such as ``max_tokens``;
                evaluations with other settings aren't compared.

        Raises:
            VersionNotFound: there is none.
        """
        body = encode(
            {
                "data_name": data_name,
                "num_lines": num_lines,
                "metrics": dict(metrics),
                "base_metrics": dict(base_metrics or {}),
                "settings": dict(settings or {}),
            }
        )
        path = f"{_path(name, version)}/{segment(data_sha256, 'data_sha256')}"
        return self._transport.send(Call("PUT", path, read_into(Evaluation), body=body))

    def list(self, name: str, version: int) -> Iterator[Evaluation]:
        """Yield the version's evaluations, newest first."""
        return all_rows(self._transport, _path(name, version), Evaluation)


def _path(name: str, version: int) -> str:
    return f"/api/v1/adapters/{segment(name, 'name')}/versions/{version}/evaluations"
