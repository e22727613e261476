"""Loading of a base that transformers' modelling code computes.

Tensors stream in as for the native decoder; linears and experts become this engine's, in any of its
formats. What isn't a linear (norms, routers) is float32.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loraserve.errors import (
    ConfigError,
    InvariantViolation,
    MissingTensor,
    ShapeMismatch,
    UnknownArchitecture,
)
from loraserve.model.checkpoint.blueprint import (
    HEAD_FORMATS,
    ModulePlan,
    SiteKind,
    SitePlan,
    check_contradiction,
    rounded_formats,
)
from loraserve.model.checkpoint.files import Checkpoint, open_checkpoint
from loraserve.model.checkpoint.headers import StoredTensor
from loraserve.model.checkpoint.loader import base_digest, log_choices, make_backend
from loraserve.model.checkpoint.site import Site, make_site, return_free_memory
from loraserve.model.checkpoint.stored_weights import StoredWeight, find_stored_weight
from loraserve.model.config.formats import Rotations, group_size
from loraserve.model.config.model_config import read_end_tokens, read_object
from loraserve.model.config.quantization_config import Layout, QuantizationConfig, parse_quantization
from loraserve.model.layers.linears import Linear, keep_outliers, quantize_weight
from loraserve.model.modelling.conversions import Conversions
from loraserve.model.modelling.expert_modules import (
    DOWN,
    GATE_UP,
    AdaptedExperts,
    PlacedExperts,
    ReferenceExperts,
    experts_spec,
    place_experts,
)
from loraserve.model.modelling.expert_sites import LinearsSite, ParametersSite, stored_linears, stored_parameters
from loraserve.model.modelling.first_batch import check_first_batch
from loraserve.model.modelling.modelled_base import ModelledBase
from loraserve.model.modelling.modelled_pass import Current, ReferenceEmbedding, ReferenceHead, ReferenceLinear
from loraserve.model.modelling.modules import AdaptedEmbedding, AdaptedHead, AdaptedLinear, RunningStep
from loraserve.model.modelling.skeleton import (
    Skeleton,
    build_skeleton,
    log_versions,
    max_position,
    read_modelled_config,
)
from loraserve.model.modelling.slots import Placed, place_linears
from loraserve.model.modelling.tensor_check import TensorCheck, listed
from loraserve.progress import Progress
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.sites import COLUMNS

_NO_IDENTITY = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Fields of config.json that don't change what a base computes, or that its digest has anyway."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of the linears.

    Attributes:
        stored: those that the checkpoint holds quantized, by path.
        quantize: what the others are rounded to; ``none``: they aren't.
        head_quantize: so for the head.
    """

    stored: Mapping[str, StoredWeight]
    quantize: str
    head_quantize: str

    @property
    def quantization(self) -> str:
        """The linears' formats; of the layers alone where the head was rounded to another."""
        return "+".join(sorted({weight.scheme.format for weight in self.stored.values()})) or self.quantize


def load_modelled(
    model_dir: Path,
    *,
    model_id: str,
    dtype: torch.dtype,
    quantize: str,
    device: str,
    max_model_len: int | None,
    activation_dtype: str = "auto",
    progress: Progress | None = None,
) -> ModelledBase:
    """Return the base model of `model_dir`, computed by transformers' modelling code.

    Arguments are those of `checkpoint.loader.load_model`.

    Raises:
        ConfigError: this machine can't do what is asked, or the base is a GGUF file.
        UnknownArchitecture: transformers doesn't have the model, or its layers can't be computed
            with paged attention; the message says what is missing.
        MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong with the
            directory, and where.
    """
    progress = progress or Progress()
    progress.begin("building the base's modules in transformers")
    if device != "cpu":
        raise ConfigError(
            "--model-impl transformers is for CPUs, and this engine would run on a GPU.",
            hint="Use --device cpu, or a base of the table in docs/bases.md.",
        )
    raw = read_object(model_dir / "config.json")
    quantization = parse_quantization(raw)
    if quantization is not None and quantization.method == "gguf":
        raise ConfigError(
            "--model-impl transformers: a GGUF file has no tensors of transformers' names.",
            hint="Leave --model-impl out, or give the Hugging Face directory.",
        )
    config = read_modelled_config(model_dir)
    skeleton = build_skeleton(config)
    log_versions()
    context = _context_len(skeleton.config, max_model_len)
    generation_path = model_dir / "generation_config.json"
    generation = read_object(generation_path) if generation_path.is_file() else {}
    loader = _Loader(skeleton, open_checkpoint(model_dir), quantization, dtype, quantize, progress)
    loader.prepare(activation_dtype)
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    identity = {name: value for name, value in raw.items() if name not in _NO_IDENTITY}
    base = loader.load(
        model_id,
        context,
        read_end_tokens(raw if raw.get("eos_token_id") is not None else text, generation),
        {"implementation": "transformers", "architecture": skeleton.architecture, **identity},
    )
    return base


def _context_len(config: Any, max_model_len: int | None) -> int:
    """Return the longest context that is served.

    Raises:
        ConfigError: more is asked for than the config has, or it states none and nothing is asked.
    """
    longest = max_position(config)
    if longest is None and max_model_len is None:
        raise ConfigError("config.json states no longest context.", hint="Give --max-model-len.")
    if max_model_len is None or longest is None:
        return longest or max_model_len or 0
    if not 0 < max_model_len <= longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}; expected at most {longest}, this model's longest context.",
            hint="Lower --max-model-len, or leave it out.",
        )
    return max_model_len


class _Loader:
    """Puts a checkpoint's tensors into a skeleton."""

    def __init__(
        self,
        skeleton: Skeleton,
        checkpoint: Checkpoint,
        quantization: QuantizationConfig | None,
        dtype: torch.dtype,
        quantize: str,
        progress: Progress,
    ) -> None:
        self._skeleton, self._checkpoint, self._dtype, self._progress = skeleton, checkpoint, dtype, progress
        self._quantization, self._asked = quantization, quantize
        model = skeleton.model
        self._placed, self._placed_experts = place_linears(skeleton), place_experts(skeleton)
        self._embedding_path, self._head_path = _outer_paths(skeleton)
        self._head: nn.Linear = model.get_submodule(self._head_path)
        self._conversions = Conversions(model, list(checkpoint.tensors))
        self._sites: dict[tuple[int, str], Site] = {}
        self._head_site: Site | None = None
        self._expert_sites: list[ParametersSite | LinearsSite] = []
        self._experts: dict[int, AdaptedExperts] = {}
        self._sinks: dict[str, Callable[[Tensor], None]] = {}
        self._expert_sinks: dict[str, Callable[[Tensor], None]] = {}
        self._unread: set[str] = set()
        self._step = RunningStep()

    def prepare(self, activation_dtype: str) -> None:
        """Compare the checkpoint's headers with the model, and choose formats.

        Raises:
            ConfigError, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong.
        """
        layers, head = self._skeleton.layers_path, self._head
        tensors = self._named_tensors()
        shapes = {
            f"{layers}.{one.layer}.{one.path}": (one.out_features, one.in_features, one.has_bias)
            for one in self._placed
        }
        self._is_tied = (
            f"{self._head_path}.weight" not in tensors
            and bool(getattr(self._skeleton.config, "tie_word_embeddings", False))
            and not any(
                name.startswith(f"{self._head_path}.") and name.rpartition(".")[2] != "bias" for name in tensors
            )
        )
        if not self._is_tied:
            shapes[self._head_path] = (head.out_features, head.in_features, head.bias is not None)
        found = {
            path: find_stored_weight(self._quantization, path, shape[:2], tensors, has_bias=shape[2])
            for path, shape in shapes.items()
        }
        stored = {path: weight for path, weight in found.items() if weight is not None}
        stored |= self._stored_experts()
        # those of single experts aren't merged any more
        tensors = self._named_tensors()
        quantize = self._asked
        if stored:
            check_contradiction(
                self._quantization, sorted({weight.scheme.format for weight in stored.values()}), quantize
            )
            quantize = "none"
        if quantize != "none" and not self._placed and not self._placed_experts:
            raise ConfigError(
                f"--quantize {quantize}: the layers of {self._skeleton.architecture} have no linear that can be "
                "rounded.",
                hint="Leave --quantize out.",
            )
        is_rotated = any(weight.scheme.rotation for weight in stored.values())
        self._formats = Formats(stored, quantize, "int8" if is_rotated else HEAD_FORMATS.get(quantize, quantize))
        rounded = rounded_formats(self._formats, activation_dtype, "cpu")
        self._rotations = Rotations(rounded)
        self._backend = make_backend("cpu", self._dtype, "none" if stored else quantize, rounded=rounded)
        self._gather_dtype = self._dtype if quantize == "none" else torch.float32
        for one in self._placed:
            self._add_site(one)
        for experts in self._placed_experts:
            self._add_experts(experts)
        if not self._is_tied:
            self._head_site = self._make_site(
                self._plan(SiteKind.HEAD, 0, "lm_head", self._head_path, head, self._formats.head_quantize)
            )
        self._check_names(tensors)

    def load(
        self, model_id: str, max_model_len: int, eos_token_ids: tuple[int, ...], identity: Mapping[str, object]
    ) -> ModelledBase:
        """Return the base."""
        skeleton, model, head = self._skeleton, self._skeleton.model, self._head
        tensors = self._stream()
        self._progress.begin("packing the embedding and the head")
        table = model.get_submodule(self._embedding_path).weight.data
        embedding, scale = self._kept_embedding(table)
        head_linear = self._head_linear(embedding)
        linears = {place: _finished(site) for place, site in self._sites.items()}
        for one in self._placed:
            path = f"{skeleton.layers_path}.{one.layer}.{one.path}"
            linear = linears[one.layer, one.path]
            _replace(model, path, AdaptedLinear(linear, one.in_features, one.slot, one.layer, self._step))
        for site in self._expert_sites:
            placed = site.placed
            adapted = AdaptedExperts(placed, site.experts(), self._step)
            self._experts[placed.layer] = adapted
            _replace(model, self._path_of(placed), adapted)
        _replace(model, self._embedding_path, AdaptedEmbedding(embedding, scale, self._step))
        _replace(model, self._head_path, AdaptedHead(head_linear, head.in_features, self._step))
        left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if left:
            raise MissingTensor(
                f"The checkpoint lacks {listed(left)}, which transformers' {skeleton.architecture} has.",
                hint="Fetch the checkpoint again, or check config.json.",
            )
        every = [
            *linears.values(),
            *(linear for one in self._experts.values() for linear in one.linears()),
            head_linear,
        ]
        size_bytes = sum(linear.num_bytes for linear in every) + embedding.nbytes
        size_bytes += sum(parameter.nbytes for parameter in model.parameters())
        spec = self._spec(model_id, max_model_len, eos_token_ids, size_bytes, every)
        spec = msgspec.structs.replace(spec, digest=base_digest(identity, tensors))
        log_choices()
        self._progress.begin("computing a first batch in transformers' code")
        kv_shape, state_shapes = check_first_batch(skeleton, self._step, spec)
        spec = msgspec.structs.replace(spec, has_recurrent_state=bool(state_shapes))
        return_free_memory()
        return ModelledBase(
            skeleton,
            spec,
            kv_shape,
            state_shapes,
            self._step,
            embedding=embedding,
            embedding_scale=scale,
            head=head_linear,
            linears=linears,
            make_reference=self._make_reference,
            progress=self._progress,
        )

    # sites

    def _plan(
        self, kind: SiteKind, layer: int, name: str, path: str, linear: nn.Linear | Placed, quantize: str
    ) -> SitePlan:
        has_bias = linear.has_bias if isinstance(linear, Placed) else linear.bias is not None
        return SitePlan(
            kind, layer, name, (ModulePlan(path, linear.out_features, has_bias),), linear.in_features, quantize
        )

    def _add_site(self, one: Placed) -> None:
        path = f"{self._skeleton.layers_path}.{one.layer}.{one.path}"
        quantize = self._formats.quantize
        if quantize != "none":
            # refuses a width before anything is read
            group_size(quantize, one.in_features)
        site = self._make_site(self._plan(SiteKind.LAYER, one.layer, one.slot or "", path, one, quantize))
        self._sites[one.layer, one.path] = site

    def _named_tensors(self) -> dict[str, StoredTensor]:
        """Map the checkpoint's tensors by their names in the model.

        Parts of quantized weights have names that no table of transformers' converts.
        """
        targets = self._conversions.targets
        return {targets.get(name, name): tensor for name, tensor in self._checkpoint.tensors.items()}

    def _stored_experts(self) -> dict[str, StoredWeight]:
        """Find the experts' weights that the checkpoint holds quantized, by their paths.

        Those of single experts aren't merged.
        """
        if self._quantization is None:
            return {}
        conversions, stored = self._conversions, dict[str, StoredWeight]()
        tensors = {
            conversions.apart.get(name) or conversions.targets.get(name, name): tensor
            for name, tensor in self._checkpoint.tensors.items()
        }

        def find(path: str, shape: tuple[int, int]) -> StoredWeight | None:
            return find_stored_weight(self._quantization, path, shape, tensors, has_bias=False)

        for placed in self._placed_experts:
            path = self._path_of(placed)
            if self._quantization.method == "mxfp4":
                stored |= stored_parameters(placed, path, tensors)
            elif own := stored_linears(placed, path, tensors, find):
                stored |= own
                conversions.leave(f"{path}.")
        return stored

    def _path_of(self, placed: PlacedExperts) -> str:
        return f"{self._skeleton.layers_path}.{placed.layer}.{placed.path}"

    def _add_experts(self, placed: PlacedExperts) -> None:
        quantize, path, stored = self._formats.quantize, self._path_of(placed), self._formats.stored
        own = [weight for name, weight in stored.items() if name.startswith(f"{path}.") and weight.tensors]
        if own and own[0].scheme.layout is not Layout.MXFP4:
            linears = LinearsSite(placed, path, stored, make=self._make_linear, dtype=self._gather_dtype)
            self._sinks |= linears.sinks
            self._unread.update(f"{weight.path}.{suffix}" for weight in own for suffix in weight.unread)
            self._expert_sites.append(linears)
            return
        if quantize != "none":
            # refuses a width before anything is read
            for parameter in (GATE_UP, DOWN):
                group_size(quantize, placed.shape(parameter)[1])

        def round_(weight: Tensor) -> Tensor | QuantizedWeight:
            if quantize == "none":
                return weight.to(self._dtype)
            return quantize_weight(weight.float(), quantize, self._rotations.block(quantize, weight.shape[1]))

        site = ParametersSite(placed, path, make=self._make_linear, round_=round_)
        self._expert_sites.append(site)
        self._expert_sinks |= site.sinks(stored)

    def _make_linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return keep_outliers(self._backend.linear(weight, bias))

    def _make_site(self, plan: SitePlan) -> Site:
        site, sinks = make_site(
            plan,
            self._formats.stored,
            make=self._make_linear,
            dtype=self._gather_dtype,
            rotation=self._rotations.block(plan.quantize, plan.in_features),
            device=torch.device("cpu"),
        )
        self._sinks.update(sinks)
        for module in plan.modules:
            weight = self._formats.stored.get(module.path)
            if weight is not None:
                self._unread.update(f"{module.path}.{suffix}" for suffix in weight.unread)
        return site

    def _check_names(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Compare names and shapes, before a byte of weights is read."""
        layers = self._skeleton.layers_path
        replaced = {f"{layers}.{one.layer}.{one.path}" for one in self._placed} | {self._head_path}
        replaced |= {self._path_of(site.placed) for site in self._expert_sites if isinstance(site, LinearsSite)}
        check = TensorCheck(
            self._skeleton,
            self._conversions,
            self._formats.stored,
            frozenset(self._sinks),
            frozenset(self._expert_sinks),
            frozenset(self._unread),
            frozenset(replaced),
            self._head_path if self._is_tied else None,
            is_quantized=self._quantization is not None,
        )
        check.check(tensors)

    def _stream(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Put every tensor in its place, and return what the digest of the base is made of."""
        found, read = [], self._checkpoint.tensors.keys() - self._conversions.ignored - self._unread
        self._progress.begin("loading the base's tensors", len(read))
        for number, (stored, tensor, raw) in enumerate(self._checkpoint.read(frozenset(read), self._progress.tick), 1):
            found.append((stored.name, stored.dtype, stored.shape, hashlib.sha256(raw).hexdigest()))
            if stored.name in self._conversions.gathered:
                for name, merged in self._conversions.merged(stored.name, tensor).items():
                    self._put(name, merged)
            else:
                self._put(self._conversions.targets.get(stored.name, stored.name), tensor)
            self._progress.advance(number)
        return found

    def _put(self, name: str, tensor: Tensor) -> None:
        """Take a tensor by its name in the model."""
        take = self._sinks.get(name) or self._expert_sinks.get(name)
        if take is not None:
            take(tensor)
            return
        path, _, key = name.rpartition(".")
        module = self._skeleton.model.get_submodule(path)
        if key in module._buffers:
            module._buffers[key] = tensor.to(module._buffers[key].dtype)
        elif key in module._parameters and module._parameters[key] is not None:
            is_table = path == self._embedding_path
            if tuple(module._parameters[key].shape) != tuple(tensor.shape):
                raise ShapeMismatch(
                    f"The tensor {name} has the shape {list(tensor.shape)}; expected "
                    f"{list(module._parameters[key].shape)} from config.json.",
                    hint="Check that config.json belongs to this checkpoint.",
                )
            kept = tensor if is_table else tensor.float()
            module._parameters[key] = nn.Parameter(kept, requires_grad=False)

    # around the layers

    def _kept_embedding(self, table: Tensor) -> tuple[Tensor, float]:
        """Return the table, and what its rows are multiplied with.

        Raises:
            UnknownArchitecture: the model's embedding computes otherwise.
        """
        module = self._skeleton.model.get_submodule(self._embedding_path)
        scale = getattr(module, "embed_scale", 1.0)
        if type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            raise UnknownArchitecture(
                f"{self._skeleton.architecture} has an embedding of its own ({type(module).__name__}).",
                hint="Choose another base model.",
            )
        return table, float(scale)

    def _head_linear(self, embedding: Tensor) -> Linear:
        if self._head_site is not None:
            return _finished(self._head_site)
        if self._head.bias is not None and self._head.bias.is_meta:
            raise MissingTensor(f"The checkpoint lacks {self._head_path}.bias.", hint="Fetch the checkpoint again.")
        bias = None if self._head.bias is None else self._head.bias.data.float()
        weight, format = embedding.to(self._gather_dtype), self._formats.head_quantize
        if format == "none":
            return self._make_linear(weight, bias)
        rotation = self._rotations.block(format, self._head.in_features)
        return self._make_linear(quantize_weight(weight, format, rotation), bias)

    def _spec(
        self,
        model_id: str,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        size_bytes: int,
        linears: list[Linear],
    ) -> BaseSpec:
        skeleton, head = self._skeleton, self._head
        slots = [
            (slot, next(one for one in self._placed if one.slot == slot))
            for slot in sorted({one.slot for one in self._placed if one.slot is not None}, key=COLUMNS.index)
        ]
        layers = {slot: tuple(one.layer for one in self._placed if one.slot == slot) for slot, _ in slots}
        arithmetics = [(a.name, a.kernel, a.instructions) for linear in linears for a in linear.arithmetics]
        every = ["+".join(dict.fromkeys(one[i] for one in arithmetics)) for i in range(3)]
        biased = [slot for slot, one in slots if one.has_bias] + ["lm_head"] * (head.bias is not None)
        floats = [p.numel() for p in skeleton.model.parameters()]
        num_weights = sum(one.out_features * one.in_features for one in self._placed)
        return BaseSpec(
            id=model_id,
            digest=Digest(""),
            architecture=skeleton.architecture,
            num_layers=skeleton.num_layers,
            hidden_size=head.in_features,
            vocab_size=head.out_features,
            max_model_len=max_model_len,
            modules={
                **{slot: (one.out_features, one.in_features) for slot, one in slots},
                "lm_head": (head.out_features, head.in_features),
                "embed_tokens": (head.in_features, head.out_features),
            },
            module_paths={
                **{slot: one.path for slot, one in slots},
                "lm_head": self._head_path,
                "embed_tokens": self._embedding_path,
            },
            layers_path=skeleton.layers_path,
            eos_token_ids=tuple(token_id for token_id in eos_token_ids if token_id < head.out_features),
            dtype=str(self._dtype).removeprefix("torch."),
            quantization=self._formats.quantization,
            arithmetic=every[0],
            kernels=every[1],
            instructions=every[2],
            device="cpu",
            num_parameters=num_weights
            + sum(floats)
            + sum(one.num_weights for one in self._placed_experts)
            + (0 if self._is_tied else head.out_features * head.in_features),
            size_bytes=size_bytes,
            biased_modules=tuple(biased),
            implementation="transformers",
            experts=experts_spec(self._placed_experts, skeleton.num_layers),
            module_layers={slot: every for slot, every in layers.items() if len(every) < skeleton.num_layers},
            is_head_tied=self._is_tied,
            is_head_quantized=self._head_path in self._formats.stored or self._formats.head_quantize != "none",
        )

    def _make_reference(self, current: Current) -> Skeleton:
        """Return another model of the parameters, whose modules compute for the pass that runs."""
        own = self._skeleton.model
        skeleton = build_skeleton(copy.deepcopy(self._skeleton.config))
        model, head = skeleton.model, self._head
        for one in self._placed:
            linear = ReferenceLinear(one.in_features, one.out_features, one.layer, one.path, one.slot, current)
            _replace(model, f"{skeleton.layers_path}.{one.layer}.{one.path}", linear)
        table = own.get_submodule(self._embedding_path)
        _replace(model, self._embedding_path, ReferenceEmbedding(table.num_embeddings, table.embedding_dim, current))
        _replace(model, self._head_path, ReferenceHead(head.in_features, head.out_features, current))
        for placed in place_experts(skeleton):
            experts = ReferenceExperts(placed, self._experts[placed.layer].experts, current)
            _replace(model, self._path_of(placed), experts)
        for path, module in own.named_modules():
            if isinstance(module, (AdaptedLinear, AdaptedExperts, AdaptedEmbedding, AdaptedHead)):
                continue
            other = model.get_submodule(path)
            other._parameters.update(module._parameters)
            other._buffers.update(module._buffers)
        return skeleton


def _outer_paths(skeleton: Skeleton) -> tuple[str, str]:
    """Return where the embedding and the head are.

    Raises:
        UnknownArchitecture: one of them isn't a module of its own.
    """
    model = skeleton.model
    modules = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise UnknownArchitecture(
            f"{skeleton.architecture} has no embedding or no head that is one linear.",
            hint="Choose another base model.",
        )
    return modules[id(embedding)], modules[id(head)]


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _finished(site: Site) -> Linear:
    if site.linear is None:
        raise InvariantViolation("a linear lacks some of its tensors")
    return site.linear
