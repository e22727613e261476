"""Adapters, their versions, and a version's certificate and evaluations."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from loraserve.contract.result import ALWAYS, Result


class Certificate(Result):
    """Difference between an adapter's answers on the server and the float32 reference.

    Both are on the same base. Differences are of logits, over all tokens at every probe position.
    None: not a finite number.
    """

    verdict: str
    """passed, or failed."""
    max_difference: float | None
    mean_difference: float | None
    base_difference: float | None
    """The largest of the base alone."""
    tolerance: float | None
    """Largest `max_difference` that passes."""
    max_effect: float | None
    """The largest change that the adapter makes to a logit of the base."""
    top1_agreement: float | None
    """The part of probe positions at which the two have the same likeliest token."""
    precision_loss: float | None
    """The largest relative error, over the adapter's modules,
    of its update as it is served against as it was uploaded.
    """
    num_probe_tokens: int
    seconds: float | None
    reason: str = ""
    """The reason why it isn't passed."""
    base_spread: float | None = 0.0
    """The rms change of the base's logits by the next code for activations that lie next to the
    middle between two, where they are rounded: the base may differ from its reference by four times
    that.
    """
    module_difference: float | None = None
    """The largest relative difference of what a module adds to random inputs, in the engine's
    kernels and in float32; None: not compared, as on GPUs.
    """
    effect_kept: float | None = None
    """The part of the adapter's effect that is left on the served base (1: all of it); None: not
    measured, as the six below.
    """
    min_effect_kept: float | None = None
    """The least `effect_kept` that passes."""
    answer_divergence: float | None = None
    """Mean KL divergence, in nats, of the adapter's answers on the served base from those on the
    float base, by token.
    """
    answer_agreement: float | None = None
    """The part of the answers' tokens at which the two have the same likeliest token."""
    base_divergence: float | None = None
    """`answer_divergence` of the base alone, on the same texts."""
    base_agreement: float | None = None
    """`answer_agreement` of the base alone, on the same texts."""
    num_answer_tokens: int = 0
    rounding_note: str = ""
    """Why the cost of rounding isn't measured on this base; empty if it is."""
    base_digest: str = ""
    """The digest of the base that it holds for.

    Empty, like the four below, in certificates of releases that didn't say.
    """
    quantization: str = ""
    arithmetic: str = ""
    """Arithmetic of that base's linears: ``w8a8-row-h64``, ``w4a16``, ``fp32`` …"""
    instructions: str = ""
    """The widest instruction sets that were used for it."""
    device: str = ""


class Evaluation(Result):
    """Result of a version's evaluation on a file of data."""

    version: int
    data_sha256: str
    """SHA-256 of the file of data: evaluations on the same data can be compared."""
    data_name: str
    num_lines: int
    metrics: dict[str, float]
    """Values by metric, of which more is better."""
    base_metrics: dict[str, float]
    """Values of the base in the same run; empty: it wasn't evaluated."""
    settings: dict[str, str]
    """Settings of the run on which its metrics depend, such as ``max_tokens``."""
    base_digest: str
    """The base that the server had."""
    arithmetic: str
    """Arithmetic of that base's linears."""
    created_at: datetime
    created_by: str
    """Id of the key that sent it."""


class ExtraFile(Result):
    """File of a version beside its config and its weights."""

    name: str
    size_bytes: int
    sha256: str


class Version(Result):
    """An immutable version of an adapter, or the outcome of a dry run (`version` is None then)."""

    name: str
    version: int | None = None
    digest: str
    """SHA-256 over the canonical config and tensors: the version's identity."""
    state: str
    """ready; quarantined: its certificate failed, or its stored bytes were found damaged, and it
    isn't served; other_base: it was made for another base than the server's, and isn't served
    there; checked: a dry run's.
    """
    base_digest: str = ""
    """The base that it was made for, as `client.base().digest`;
    empty where the server doesn't say.
    """
    size_bytes: int
    rank: int
    """The highest of its modules."""
    target_modules: list[str]
    dtype: Annotated[str | None, ALWAYS] = None
    aliases: list[str]
    notes: str | None = ""
    """Notes; None in lists, unless they were asked for with ``include=notes``."""
    tags: dict[str, str] = Field(default_factory=dict)
    created_at: datetime
    created_by: str = ""
    """Id of the key that published it; empty for a dry run, or where the server doesn't say."""
    checks: list[dict[str, Any]] = Field(default_factory=list)
    """The checks before publishing, and their findings."""
    warnings: list[str] = Field(default_factory=list)
    """Findings that don't keep it from being served,
    such as the name of another base in its config.
    """
    extra_files: list[ExtraFile] = Field(default_factory=list)
    """Files for chats with it: its own chat template, and defaults of requests' fields."""
    tool_parser: str | None = None
    """Format of its tool calls; None: recognized in its template, or the base's."""
    reasoning_parser: str | None = None
    """Format of its reasoning; None: recognized in its template, or the base's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that it sets for its chat template; those of a request go before them."""
    evaluation: Evaluation | None = None
    """Newest of its evaluations; None: it has none."""

    _is_unchanged: bool = PrivateAttr(default=False)

    @property
    def is_unchanged(self) -> bool:
        """Whether a push found that the version has the pushed bytes already, and made none."""
        return self._is_unchanged

    @property
    def model(self) -> str:
        """The `model=` that names exactly this version."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @property
    def is_quarantined(self) -> bool:
        return self.state == "quarantined"

    @property
    def is_of_another_base(self) -> bool:
        return self.state == "other_base"

    @property
    def verdict(self) -> str | None:
        """passed, degraded, not_possible, failed, or skipped: there is no certificate.

        degraded: it is served, but rounding the base takes too much of its effect. not_possible:
        it is served, and that, or whether it is computed right, couldn't be measured. None: the
        server verifies nothing.
        """
        return self.detail_of("parity", "status")

    @property
    def certificate(self) -> Certificate | None:
        found = next((check.get("certificate") for check in self.checks if check.get("name") == "parity"), None)
        return None if found is None else Certificate.model_validate(found)

    def detail_of(self, check: str, field: str = "detail") -> str | None:
        """Find what the check of this name found; None if there is no such check."""
        return next((str(one[field]) for one in self.checks if one.get("name") == check and field in one), None)


class Share(Result):
    """A version of a split, and how much of the traffic it gets against the others' weights."""

    version: int
    weight: float


class Adapter(Result):
    name: str
    aliases: dict[str, int]
    """Alias → version; of a split, the version with the largest weight."""
    splits: dict[str, list[Share]] = Field(default_factory=dict)
    """Versions and weights of each alias that is split."""
    num_versions: int
    num_versions_of_another_base: int = 0
    """Versions among those that were made for another base than the server's,
    and aren't served there.
    """
    latest_version: int | None
    notes: str | None = ""
    """Notes; None in lists, unless they were asked for with ``include=notes``."""
    tags: dict[str, str] = Field(default_factory=dict)
    fallback: str | None = None
    """Substitute when the requested version can't answer: a version's number, an alias,
    or ``base``; None: none.
    """
    created_at: datetime
    updated_at: datetime


class Action(Result):
    """Outcome of `warm`, `pin` or `unpin`."""

    name: str
    version: int
    digest: str
    action: str
    is_done: bool
    """False: begun, and still under way when the server stopped waiting."""
