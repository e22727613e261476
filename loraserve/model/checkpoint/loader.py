"""Loading of a resident decoder from a directory.

Weights stream in tensor by tensor: never more than the final weights and one shard are in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from loraserve import faults
from loraserve.base_advice import CALIBRATION_GAIN
from loraserve.errors import ConfigError, InvariantViolation
from loraserve.model.backends.backend import Backend, DecoderLayer, Norm
from loraserve.model.backends.cpu_backend import CpuBackend
from loraserve.model.checkpoint.blueprint import (
    Blueprint,
    SiteKind,
    SitePlan,
    check_gpu,
    check_gpu_blocks,
    context_len,
    draw,
    rounded_formats,
)
from loraserve.model.checkpoint.cutting import check_grid, cut_of, is_row_parallel, rotation_of
from loraserve.model.checkpoint.files import Checkpoint, open_checkpoint
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.checkpoint.site import MakeLinear, Site, make_site, return_free_memory
from loraserve.model.config.formats import Rotations
from loraserve.model.config.model_config import read_config
from loraserve.model.decoder import Decoder
from loraserve.model.layers.embedding import EmbeddingTable, quantized_table
from loraserve.model.layers.experts import make_mixture
from loraserve.model.layers.linears import Linear, keep_outliers, make_linear, quantize_weight
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp, Mlp
from loraserve.model.layers.norms import RMSNorm
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.model.parallel.grid import Grid
from loraserve.model.parallel.member import GroupMember
from loraserve.model.parallel.part_facts import Multiplied, PartFacts, Tensors, join_facts
from loraserve.model.parallel.rank_part import RankPart, cut_site
from loraserve.progress import Progress
from loraserve.types import Digest
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.cpu.instructions import choose_functions
from loraserve_kernels.cpu.linear.chooser import chooser, lines

logger = logging.getLogger(__name__)


def load_model(
    model_dir: Path,
    *,
    model_id: str,
    dtype: torch.dtype,
    quantize: str,
    device: str,
    max_model_len: int | None,
    activation_dtype: str = "auto",
    progress: Progress | None = None,
    member: GroupMember | None = None,
) -> Decoder:
    """Load the base model of `model_dir`, ready to run.

    Args:
        model_id: the name that clients use.
        dtype: what weights are kept in when they aren't quantized; activations are float32.
        quantize: ``none``: weights stay what they are in the checkpoint, also where it's quantized
            already. ``int8``, ``int4``, ``nf4`` or ``fp8``: what a float checkpoint's linears are
            rounded to while they stream in; the head to int8 for the two of 4 bits.
        device: ``cpu`` or ``cuda``.
        max_model_len: None: the config's. More than that only as far as its rope scaling
            covers.
        activation_dtype: as for `blueprint.rounded_formats`.
        progress: notified how far the load is, and by the decoder of each part of a forward pass;
            None: nothing reads it.
        member: of the group that shares the base, of which this process holds its part, on a CPU;
            None: it holds all of it.

    Raises:
        ConfigError: this machine can't do what is requested, the base can't be cut so,
            max_model_len is more than the model has, the checkpoint is quantized to something else
            than `quantize`, or no linear can round its activations to `activation_dtype`.
        UnknownArchitecture, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is
            wrong with the directory, and where.
    """
    progress = progress or Progress()
    progress.begin("reading the base's config and headers")
    choose_functions()
    # refuses a device, a dtype or a format before anything is read
    make_backend(device, dtype, quantize)
    config = read_config(model_dir)
    if device != "cpu":
        check_gpu(config)
        check_gpu_blocks(config.quantization)
    if config.wrapper is not None:
        logger.info("serving the decoder of %s; the tensors that read images are left out", config.wrapper)
    context = context_len(config, max_model_len)
    config = config.for_context(context)
    checkpoint = open_checkpoint(model_dir)
    blueprint = draw(config, checkpoint.tensors, quantize)
    if member is not None:
        check_grid(blueprint, member.grid)
    for format in blueprint.stored_formats:
        # refuses what this device can't multiply
        make_backend(device, dtype, format)
    rounded = rounded_formats(blueprint, activation_dtype, device)
    backend = make_backend(device, dtype, "none" if blueprint.stored else quantize, rounded=rounded)
    # a GPU rounds no activations
    rotations = Rotations(rounded if device == "cpu" else frozenset(), 1 if member is None else member.grid.tensor)
    loader = _Loader(blueprint, checkpoint, backend, dtype, device, progress, member, rotations)
    before = chooser().around
    chooser().around = lambda format: progress.aside(f"probing kernels for {format}")
    try:
        return loader.load(model_id, context)
    finally:
        chooser().around = before


def make_backend(device: str, dtype: torch.dtype, quantize: str, *, rounded: Collection[str] = ("int8",)) -> Backend:
    """Build the backend of a kind of device.

    Args:
        rounded: formats of weights for which a CPU rounds activations to int8, as
            `blueprint.rounded_formats` has them; a GPU never does.

    Raises:
        ConfigError: there's no such device here, or it can't keep weights so.
    """
    if device == "cpu":
        return CpuBackend(dtype, quantize, rounded=rounded)
    if device == "cuda":
        # Triton is loaded for GPUs alone
        from loraserve.model.backends.gpu_backend import GpuBackend

        # without a GPU only Triton's interpreter brings us here
        return GpuBackend(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype, quantize)
    raise ConfigError(f"The device {device!r} isn't available; expected cpu or cuda.")


class _Loader:
    def __init__(
        self,
        blueprint: Blueprint,
        checkpoint: Checkpoint,
        backend: Backend,
        dtype: torch.dtype,
        device: str,
        progress: Progress,
        member: GroupMember | None,
        rotations: Rotations,
    ) -> None:
        self._rotations = rotations
        self._blueprint, self._checkpoint, self._dtype = blueprint, checkpoint, dtype
        self._progress, self._member = progress, member
        self._config, self._backend, self._device = blueprint.config, backend, device
        place = Grid().place(0, self._config) if member is None else member.place(self._config)
        self._stage = stage = place.stage
        self._part = None
        if member is not None and member.ranks is not None:
            self._part = RankPart(place.shard, member.ranks)
        # codes are made from float32, whatever the checkpoint has
        self._gather_dtype = dtype if blueprint.quantize == "none" else torch.float32
        self._sinks: dict[str, Callable[[str, Tensor], None]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._sites: dict[tuple[int, str], Site] = {}
        self._routers: dict[int, list[Site]] = {}
        # by layer, in the experts' order: gate and up, down
        self._experts: dict[int, list[Site]] = {}
        self._head: Site | None = None
        if stage.is_first or (stage.is_last and blueprint.is_head_tied):
            self._sinks[self._config.architecture.embedding] = self._keep_as_is
        for name in blueprint.norms:
            if stage.has_tensor(name):
                self._sinks[name] = self._keep_norm
        for plan in blueprint.sites:
            if stage.is_last if plan.kind is SiteKind.HEAD else plan.layer in stage.layers:
                self._add(plan)

    def load(self, model_id: str, max_model_len: int) -> Decoder:
        config, architecture, stage, part = self._config, self._config.architecture, self._stage, self._part
        tensors = self._stream()
        self._progress.begin("packing the embedding and the head")
        rotaries = [
            RotaryEmbedding(rope, config.head_dim, max_model_len, is_interleaved=architecture.is_rope_interleaved)
            for rope in config.ropes
        ]
        self._backend.bind(config if part is None else part.shard.config, *rotaries)
        table = self._embedding()
        head = self._make_head(table) if stage.is_last else None
        embedding = self._make_table(table, head) if stage.is_first else None
        layers = tuple(self._layer(layer) for layer in stage.layers)
        delta_name = self._name(stage.layers[-1], architecture.mlp_out_norm)
        # the stages before the last end with the sum
        norm = self._norm(architecture.norm if stage.is_last else None, delta_name)
        size_bytes = sum(site.linear.num_bytes for site in self._all_sites() if site.linear is not None)
        size_bytes += sum(t.nbytes for t in self._tensors.values()) + sum(r.num_bytes for r in rotaries)
        size_bytes += 0 if head is None else head.num_bytes
        size_bytes += 0 if embedding is None else embedding.nbytes
        facts = self._shared(self._facts(tensors, size_bytes, head))
        spec = self._blueprint.spec(
            id=model_id,
            digest=base_digest(config.identity(), facts.tensors),
            dtype=str(self._dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            size_bytes=facts.num_bytes,
        )
        if self._device == "cpu":
            log_choices()
        if self._blueprint.quantize == "int4":
            logger.warning("%s", CALIBRATION_GAIN)
        spec = msgspec.structs.replace(spec, device=self._device, **_arithmetic(facts))
        return_free_memory()
        return Decoder(
            config,
            spec,
            self._backend,
            embedding=embedding,
            layers=layers,
            norm=norm,
            head=head,
            norm_weights=self._tensors,
            progress=self._progress,
            part=part,
            stage=stage,
            rotations=self._rotations,
        )

    def _facts(self, tensors: Tensors, size_bytes: int, head: Linear | None) -> PartFacts:
        """Collect what is to be known of this part.

        How a router multiplies, in float32 always, isn't counted.
        """
        experts = [site for experts in self._experts.values() for site in experts]
        return PartFacts(
            tensors,
            size_bytes,
            layers=_multiplied(_finished(site) for site in self._sites.values()),
            experts=_multiplied(_finished(site) for site in experts),
            head=_multiplied(() if head is None else (head,)),
        )

    def _shared(self, facts: PartFacts) -> PartFacts:
        """Share the facts: those of the whole base on rank 0; of this part on the others."""
        member = self._member
        if member is None:
            return facts
        if member.grid.pipeline == 1:
            # each rank has read all tensors, and all parts are of one shape
            return msgspec.structs.replace(facts, num_bytes=facts.num_bytes * member.grid.size)
        return join_facts(member.share(facts))

    def _add(self, plan: SitePlan) -> None:
        """Make the site that the plan's tensors will go to."""
        if plan.kind is SiteKind.HEAD:
            self._head = self._site(plan, self._make_head_linear)
        elif plan.kind is SiteKind.ROUTER:
            self._routers.setdefault(plan.layer, []).append(self._site(plan, self._make_router))
        elif plan.kind is SiteKind.EXPERT:
            self._experts.setdefault(plan.layer, []).append(self._site(plan, self._maker(plan)))
        else:
            self._sites[plan.layer, plan.name] = self._site(plan, self._maker(plan))

    def _site(self, plan: SitePlan, make: MakeLinear) -> Site:
        site, sinks = make_site(
            plan,
            self._blueprint.stored,
            make=make,
            dtype=self._gather_dtype,
            rotation=rotation_of(self._rotations, plan),
            device=self._backend.device,
            cut=None if self._part is None else partial(cut_site, cut_of(self._part.shard, plan)),
        )
        self._sinks.update({name: _unnamed(sink) for name, sink in sinks.items()})
        return site

    def _maker(self, plan: SitePlan) -> MakeLinear:
        """Choose what makes a site's linears: those with all of each row keep outliers."""
        return self._backend.linear if is_row_parallel(plan) else self._make_whole

    def _make_whole(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return keep_outliers(self._backend.linear(weight, bias))

    def _make_router(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias, quantize="none", dtype=torch.float32)

    def _all_sites(self) -> Iterator[Site]:
        yield from self._sites.values()
        for routers in self._routers.values():
            yield from routers
        for experts in self._experts.values():
            yield from experts

    def _keep_norm(self, name: str, tensor: Tensor) -> None:
        weight, offset = tensor.float(), self._config.architecture.norm_offset
        self._tensors[name] = weight + offset if offset else weight

    def _keep_as_is(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def _embedding(self) -> Tensor | QuantizedWeight | None:
        """Take the embedding as the checkpoint holds it; None: this stage hasn't read it."""
        tensor = self._tensors.pop(self._config.architecture.embedding, None)
        stored = self._blueprint.stored_embedding
        return tensor if tensor is None or stored is None else assemble(stored, {"weight": tensor})

    def _make_table(self, embedding: Tensor | QuantizedWeight | None, head: Linear | None) -> EmbeddingTable:
        """Build the embedding's table, or this rank's part of it."""
        if embedding is None:
            raise InvariantViolation("a base has no embedding")
        if isinstance(embedding, QuantizedWeight):
            if self._part is None and self._device == "cpu":
                return quantized_table(embedding, head if self._head is None else None)
            # parts have a row of zeros, and a GPU's kernel looks up floats
            embedding = embedding.dequantize(torch.float32 if self._device == "cpu" else self._dtype)
        table = embedding if self._part is None else self._part.embedding.table(embedding)
        return table.to(self._backend.device)

    def _make_head(self, embedding: Tensor | QuantizedWeight | None) -> Linear:
        """Build the head: the checkpoint's, or the embedding as the head."""
        if self._head is not None:
            return _finished(self._head)
        if embedding is None:
            raise InvariantViolation("a base has neither a head nor an embedding to take for it")
        weight = embedding if isinstance(embedding, QuantizedWeight) else embedding.to(self._gather_dtype)
        if self._part is not None:
            # the head's scales are of its rows
            weight, _ = cut_site(self._part.shard.site_cut("lm_head"), weight, None, 0, self._config.vocab_size)
        format = self._blueprint.head_quantize
        if isinstance(weight, Tensor) and format != "none":
            rotation = self._rotations.block(format, self._config.hidden_size)
            weight = quantize_weight(weight.to(self._backend.device), format, rotation)
        return self._make_head_linear(weight, None)

    def _make_head_linear(self, weight: Tensor | QuantizedWeight, _: Tensor | None) -> Linear:
        return keep_outliers(self._backend.head(weight))

    def _stream(self) -> Tensors:
        """Put every tensor in its place, and return what the digest of the base is made of."""
        tensors: Tensors = []
        wanted = [stored for stored in self._checkpoint.tensors.values() if stored.name in self._sinks]
        in_file = Counter(stored.file for stored in wanted)
        shards, shard = list(in_file), 0
        what = "" if self._blueprint.quantize == "none" else f" and rounding it to {self._blueprint.quantize}"
        # hashing a tensor and placing it take about as long, and both leave the interpreter's lock
        with ThreadPoolExecutor(1, "model-hash") as pool:
            for stored, tensor, raw in self._checkpoint.read(frozenset(self._sinks), self._progress.tick):
                if shard == 0 or stored.file != shards[shard - 1]:
                    shard += 1
                    num_placed = 0
                    total = in_file[stored.file]
                    self._progress.begin(f"loading shard {shard} of {len(shards)}{what}, tensors", total)
                faults.hit("model.tensor")
                hashed = pool.submit(_sha256, raw)
                self._sinks[stored.name](stored.name, tensor)
                tensors.append((stored.name, stored.dtype, stored.shape, hashed.result()))
                num_placed += 1
                self._progress.advance(num_placed)
                del tensor, raw, hashed
        return tensors

    def _layer(self, layer: int) -> DecoderLayer:
        config, architecture = self._config, self._config.architecture
        prefix = f"{architecture.layers}.{layer}."
        return DecoderLayer(
            attention_norm=self._norm(
                self._name(layer, architecture.attention_norm),
                # the stage before has added its last delta
                None if layer == self._stage.layers[0] else self._name(layer - 1, architecture.mlp_out_norm),
            ),
            qkv=self._linear(layer, "qkv"),
            q_norm=self._head_norm(prefix + architecture.q_norm, is_query=True) if architecture.has_qk_norm else None,
            k_norm=self._head_norm(prefix + architecture.k_norm, is_query=False) if architecture.has_qk_norm else None,
            o=self._linear(layer, "o"),
            mlp_norm=self._norm(
                self._name(layer, architecture.mlp_norm), self._name(layer, architecture.attention_out_norm)
            ),
            mlp=self._mlp(layer),
            sliding_window=config.sliding_windows[layer],
            rope=config.layer_ropes[layer],
        )

    def _name(self, layer: int, name: str | None) -> str | None:
        """Format the whole name of a layer's tensor, if it has such a one."""
        return None if name is None else f"{self._config.architecture.layers}.{layer}.{name}"

    def _norm(self, name: str | None, delta_name: str | None) -> Norm:
        """Build the norm of the sum that a delta was added to.

        The delta is normed itself where it has a norm.
        """
        config = self._config
        return self._backend.norm(
            None if name is None else self._tensors[name],
            config.rms_norm_eps,
            delta_weight=None if delta_name is None else self._tensors[delta_name],
            delta_scale=config.residual_scale,
        )

    def _head_norm(self, name: str, *, is_query: bool) -> RMSNorm:
        weight, eps = self._tensors[name].to(self._backend.device), self._config.rms_norm_eps
        return RMSNorm(weight, eps) if self._part is None else self._part.head_norm(weight, eps, is_query=is_query)

    def _mlp(self, layer: int) -> Mlp:
        experts = self._config.experts
        if experts is None:
            return GatedMlp(self._linear(layer, "gate_up"), self._linear(layer, "down"), self._backend.gated)
        routers, linears = ([_finished(site) for site in held[layer]] for held in (self._routers, self._experts))
        own = layer - self._stage.layers[0]
        mixture = make_mixture(experts, routers, linears, self._backend.gated, own)
        return mixture if self._part is None else self._part.experts(mixture)

    def _linear(self, layer: int, site: str) -> LoraLinear:
        base, own = _finished(self._sites[layer, site]), layer - self._stage.layers[0]
        return LoraLinear(base, site, own) if self._part is None else self._part.linear(base, site, own)


def log_choices() -> None:
    """Log which kernels compute the linears, and which formats are slower than float32 would be."""
    for is_slower, line in lines(chooser().choices()):
        if is_slower:
            logger.warning(
                "%s. This is slower than float32 and only saves memory; --quantize none is faster here.", line
            )
        else:
            logger.info("%s", line)


def _finished(site: Site) -> Linear:
    if site.linear is None:
        raise InvariantViolation("a linear lacks some of its tensors")
    return site.linear


def _multiplied(linears: Iterable[Linear]) -> list[Multiplied]:
    return [(one.name, one.kernel, one.instructions) for linear in linears for one in linear.arithmetics]


def _arithmetic(facts: PartFacts) -> dict[str, str]:
    """Join the spec's fields on how linears multiply."""
    every = [*facts.layers, *facts.experts, *facts.head]
    names = ("arithmetic", "kernels", "instructions")
    # each once, in the order in which they come
    return {name: "+".join(dict.fromkeys(one[i] for one in every)) for i, name in enumerate(names)}


def _unnamed(sink: Callable[[Tensor], None]) -> Callable[[str, Tensor], None]:
    return lambda _, tensor: sink(tensor)


def base_digest(identity: Mapping[str, object], tensors: Tensors) -> Digest:
    """Hash what a base computes, by SHA-256.

    That is its config's identity and its tensors' names, dtypes, shapes and content. The same
    weights in other shards, or in another order, have the same digest. Every part is framed: no two
    bases share an input.
    """
    entries = sorted([name, dtype, list(shape), sha256] for name, dtype, shape, sha256 in tensors)
    framed = json.dumps({"base": 1, "config": identity, "tensors": entries}, sort_keys=True, separators=(",", ":"))
    return Digest(hashlib.sha256(framed.encode()).hexdigest())


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
