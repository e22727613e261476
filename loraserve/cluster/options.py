"""Options of a cluster, beside the settings of its servers."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ClusterOptions(BaseModel):
    """How many replicas there are, what each gets, and when there are more or fewer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    replicas: int = Field(default=2, ge=1, le=1024)
    """Engine replicas at the start, and the fewest later."""
    max_replicas: int | None = Field(default=None, ge=1, le=1024)
    """Most engine replicas under load. Default: as many as at the start."""
    cpus_per_replica: float = Field(default=1.0, ge=0, le=1024)
    """Processors that Ray reserves for a replica."""
    gpus_per_replica: float = Field(default=0.0, ge=0, le=64)
    """GPUs that Ray reserves for a replica."""
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    """How long streams may go on at a replica that leaves; then they move to another."""

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, fewer than the {self.replicas} of the start")
        return self
