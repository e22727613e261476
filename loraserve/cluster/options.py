"""Options of a cluster, in addition to the settings of its servers."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraserve.errors import ConfigError


class ClusterOptions(BaseModel):
    """Number of replicas, resources of each, and when there are more or fewer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    replicas: int = Field(default=2, ge=1, le=1024)
    """Engine replicas at the start."""
    min_replicas: int | None = Field(default=None, ge=1, le=1024)
    """Fewest engine replicas later. Default: as many as at the start."""
    max_replicas: int | None = Field(default=None, ge=1, le=1024)
    """Cap on engine replicas under load. Default: as many as at the start."""
    target_requests: float | None = Field(default=None, gt=0, le=1e6)
    """Requests per replica to keep with more or fewer replicas.

    Default: three quarters of --max-num-seqs.
    """
    max_ttft: float = Field(default=2.0, gt=0, le=3600)
    """Mean seconds to the first token beyond which a replica is added."""
    scale_up_delay: float = Field(default=5.0, ge=0, le=86_400)
    """Time for which more replicas must be needed until they are added."""
    scale_down_delay: float = Field(default=120.0, ge=0, le=86_400)
    """Time for which fewer replicas must be enough until some are removed."""
    cpus_per_replica: float = Field(default=1.0, ge=0, le=1024)
    """Processors that Ray reserves for a replica."""
    gpus_per_replica: float = Field(default=0.0, ge=0, le=64)
    """GPUs that Ray reserves for a replica."""
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    """Time for which streams may continue at a replica that leaves; then they move to another."""

    @classmethod
    def load(cls, **options: object) -> ClusterOptions:
        """Check the options; one that is None wasn't given.

        Raises:
            ConfigError: one is unknown or impossible.
        """
        try:
            return cls.model_validate({name: value for name, value in options.items() if value is not None})
        except ValidationError as error:
            reasons = [
                f"{'--' + str(problem['loc'][0]).replace('_', '-') + ': ' if problem['loc'] else ''}"
                f"{problem['msg'].removeprefix('Value error, ')}"
                for problem in error.errors(include_input=False, include_url=False)
            ]
            raise ConfigError("; ".join(reasons) + ".") from None

    @property
    def fewest(self) -> int:
        """Fewest engine replicas."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Cap on engine replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.fewest <= self.replicas <= self.most:
            raise ValueError(
                f"--replicas is {self.replicas}; expected it from --min-replicas {self.fewest} to"
                f" --max-replicas {self.most}"
            )
        return self
