"""Parts of a base for the processes that share it: what each site gives, what can be cut.

Imports no torch.
"""

from __future__ import annotations

from loraserve.errors import ConfigError
from loraserve.limits import LIMITS
from loraserve.model.checkpoint.blueprint import Blueprint, SiteKind, SitePlan
from loraserve.model.config.formats import Rotations, group_size
from loraserve.model.parallel.grid import Grid
from loraserve.model.parallel.shard import Shard, SiteCut


def cut_of(shard: Shard, plan: SitePlan) -> SiteCut:
    """Choose the part of a site's weight."""
    if plan.kind is SiteKind.ROUTER:
        return SiteCut(None, None)
    if plan.kind is not SiteKind.EXPERT:
        return shard.site_cut(plan.name)
    is_down = is_row_parallel(plan)
    return shard.expert_cut(plan.in_features if is_down else plan.modules[0].out_features, is_down=is_down)


def is_row_parallel(plan: SitePlan) -> bool:
    """Check whether ranks share a site's inputs, and not its outputs."""
    return plan.name in ("o", "down") or (plan.kind is SiteKind.EXPERT and len(plan.modules) == 1)


def rotation_of(rotations: Rotations, plan: SitePlan) -> int:
    """Choose the inputs of a Hadamard block of a site's float weights; 0: they aren't rotated."""
    return rotations.block(plan.quantize, plan.in_features, is_row_parallel=is_row_parallel(plan))


def check_grid(blueprint: Blueprint, grid: Grid) -> None:
    """Raise an error if a base can't be shared by that many processes.

    Raises:
        ConfigError: it can't; the message says what doesn't divide, and which numbers do.
    """
    num_layers, problem = blueprint.config.num_layers, _problem(blueprint, grid.tensor)
    if grid.pipeline > num_layers:
        raise ConfigError(
            f"--pipeline-parallel {grid.pipeline}: this base has {num_layers} layers (num_hidden_layers), "
            "and each stage needs one.",
            hint=f"This base can be served by at most {num_layers} stages.",
        )
    if problem is not None:
        working = [str(n) for n in range(1, LIMITS.max_ranks + 1) if _problem(blueprint, n) is None]
        raise ConfigError(
            f"--tensor-parallel {grid.tensor}: {problem}.",
            hint=f"This base can be served by {_listed(working)} {'rank' if working == ['1'] else 'ranks'}.",
        )
    if grid.size > LIMITS.max_ranks:
        raise ConfigError(
            f"--tensor-parallel {grid.tensor} and --pipeline-parallel {grid.pipeline} make {grid.size} processes; "
            f"at most {LIMITS.max_ranks} are served.",
            hint="Lower one of them.",
        )


def _problem(blueprint: Blueprint, size: int) -> str | None:
    """Describe what can't be cut into that many parts; None: all can."""
    config = blueprint.config
    if size > LIMITS.max_ranks:
        return f"at most {LIMITS.max_ranks} ranks are served"
    if config.num_heads % size:
        return f"{config.num_heads} attention heads (num_attention_heads) aren't a multiple of it"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return (
            f"{config.num_kv_heads} KV heads (num_key_value_heads) are neither a multiple of it nor a divisor, "
            "by which each rank would have one"
        )
    experts = config.experts
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    for count in (inner, 0 if experts is None else experts.shared_intermediate_size or 0):
        if count % size:
            return f"{count} inner features of an MLP (intermediate_size) aren't a multiple of it"
    for plan in blueprint.sites:
        if is_row_parallel(plan):
            stored = blueprint.stored.get(plan.modules[0].path)
            if size > 1 and stored is not None and stored.scheme.is_reordered and stored.order_name is not None:
                return (
                    f"the inputs of {plan.modules[0].path} are quantized in another order than they stand "
                    "(desc_act or actorder), which can't be cut"
                )
            group = _group(blueprint, plan)
            if plan.in_features // size % group:
                return (
                    f"a rank would have {plan.in_features // size} inputs of {plan.modules[0].path}, "
                    f"whose scales are of groups of {group}"
                )
    return None


def _group(blueprint: Blueprint, plan: SitePlan) -> int:
    """Compute how many inputs of a row-parallel linear must stay together: those with one scale."""
    stored = blueprint.stored.get(plan.modules[0].path)
    if stored is None:
        format, group = plan.quantize, 1
        if format in ("int4", "nf4"):
            group = group_size(format, plan.in_features)
        # one scale of an output channel is that of each part of it
        return group
    return stored.group_size if stored.has_groups else 1


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
