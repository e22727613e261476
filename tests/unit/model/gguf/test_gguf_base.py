"""A base in a GGUF file computes what transformers' model of the same weights does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_files import dequantized, words, write_gguf
from rank_pool import RankPool

from loraserve.errors import LoraserveError
from loraserve.model.checkpoint.blueprint import check_gpu_blocks, draw
from loraserve.model.checkpoint.cutting import check_grid
from loraserve.model.checkpoint.headers import read_headers
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.checkpoint.source import resolve_model_dir
from loraserve.model.config.gguf_types import TYPES
from loraserve.model.config.model_config import read_config
from loraserve.model.gguf.gguf_config import make_config
from loraserve.model.gguf.gguf_file import Gguf, GgufTensor
from loraserve.model.parallel.grid import Grid

from ..conftest import PagedRun, build_model, load, random_tokens, reference_logits, save_model
from ..parallel.test_architectures import logits
from .test_gguf_blocks import random_rows

pytestmark = pytest.mark.usefixtures("cache_home")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 301}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True},
    "llama bias of mlp": {"mlp_bias": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "granite": {"embedding_multiplier": 1.5, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 6},
    "gemma": {},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 5},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128},
    "exaone4": {"sliding_window": 8, "num_hidden_layers": 5},
    "exaone4 without window": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "seed-oss": {},
    "seed-oss other biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "ernie4.5": {},
    "ernie4.5 biases": {"use_bias": True},
    "hunyuan": {},
    "glm4": {"pad_token_id": 0},
    "qwen2-moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "phi3": {"sliding_window": None, "pad_token_id": 0, "head_dim": None, "num_attention_heads": 2},
}


def built(kind: str, **more: Any) -> Any:
    settings = {**SIZES, **KINDS[kind], **more}
    return build_model(kind.split()[0], **{name: value for name, value in settings.items() if value is not None})


def difference(file: Path, model: Any, count: int = 40) -> float:
    tokens = random_tokens(count)
    decoder = load(resolve_model_dir(str(file)), activation_dtype="float")
    ours, theirs = PagedRun(decoder).logits(tokens, [count]), reference_logits(model, tokens)
    # random blocks make logits of some tens
    return float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max()) / 10))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = built(kind)
    assert difference(write_gguf(model, tmp_path / "base.gguf"), model) < 1e-4


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 2.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_stretched_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    parameters, metadata = ROPES[name]
    model = built("llama", rope_parameters={**parameters, "rope_theta": 10_000.0})
    assert difference(write_gguf(model, tmp_path / "base.gguf", metadata=metadata), model) < 1e-4


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_equal_transformers(factor: float, tmp_path: Path) -> None:
    theta = 500_000.0
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = built("llama", rope_parameters=parameters)
    # the converter writes what plain frequencies are divided by
    plain = 1 / theta ** (torch.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    assert factors.max() == pytest.approx(factor)
    file = write_gguf(model, tmp_path / "base.gguf", extra={"rope_freqs.weight": factors})
    assert difference(file, model) < 1e-4
    wrong = write_gguf(model, tmp_path / "wrong.gguf", extra={"rope_freqs.weight": 1.5 * factors})
    with pytest.raises(LoraserveError, match="of no scaling that Llama 3 was published with"):
        resolve_model_dir(str(wrong))


@pytest.mark.parametrize("max_model_len", [None, 128])
def test_longrope_factors_equal_transformers(max_model_len: int | None, tmp_path: Path) -> None:
    # head_dim 32, whose pairs have factors of their own
    factors = {"short": [1 + 0.1 * i for i in range(16)], "long": [2 + 0.3 * i for i in range(16)]}
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": factors["short"],
        "long_factor": factors["long"],
    }
    contexts = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    model = built("phi3", rope_parameters=parameters, **contexts)
    stretch = (1 + np.log(4) / np.log(32)) ** 0.5
    metadata = {"phi3.rope.scaling.original_context_length": 32, "phi3.rope.scaling.attn_factor": float(stretch)}
    extra = {f"rope_factors_{name}.weight": np.array(some, dtype=np.float32) for name, some in factors.items()}
    file = write_gguf(model, tmp_path / "base.gguf", metadata=metadata, extra=extra)
    tokens = random_tokens(32 if max_model_len is None else 50)
    decoder = load(resolve_model_dir(str(file)), max_model_len=max_model_len)
    ours, theirs = PagedRun(decoder).logits(tokens, [20]), reference_logits(model, tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_vocabulary_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens, _ = words(302)
    file = write_gguf(built("llama"), tmp_path / "base.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(LoraserveError, match="302 tokens, and its embedding 301 rows"):
        resolve_model_dir(str(file))


@pytest.mark.parametrize("form", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen2", "mixtral"])
def test_quantized_weights_are_taken_as_stored(kind: str, form: str, tmp_path: Path) -> None:
    model = built(kind)
    file = write_gguf(model, tmp_path / "base.gguf", form)
    assert difference(file, dequantized(model, form)) < 1e-4


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_types_of_large_blocks_are_served(name: str, tmp_path: Path) -> None:
    # llama.cpp's package reads them, and doesn't write them
    model = built("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    rows = {path: tensor for path, tensor in model.state_dict().items() if tensor.dim() == 2}
    raw = {path: random_rows(name, *tensor.shape, scale=5e-4) for path, tensor in rows.items()}
    for path, tensor in rows.items():
        tensor.copy_(torch.from_numpy(quants.dequantize(raw[path], GGMLQuantizationType[name])))
    file = write_gguf(model, tmp_path / "base.gguf", name, raw=raw)
    assert difference(file, model) < 1e-4


@pytest.mark.parametrize(
    "name", [type_.name for type_ in TYPES.values() if type_.name.startswith(("IQ1", "IQ2", "IQ3", "TQ"))]
)
def test_types_of_few_bits_are_refused_with_cure(name: str, tmp_path: Path) -> None:
    model = built("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    size = next(type_ for type_ in TYPES.values() if type_.name == name)
    raw = {
        path: np.zeros((tensor.shape[0], tensor.shape[1] // size.block * size.num_bytes), dtype=np.uint8)
        for path, tensor in model.state_dict().items()
        if tensor.dim() == 2
    }
    file = write_gguf(model, tmp_path / "base.gguf", name, raw=raw)
    with pytest.raises(LoraserveError, match=f'is "{name}"; expected one of Q4_0') as caught:
        read_config(resolve_model_dir(str(file)))
    assert "llama-quantize --allow-requantize FILE OUT Q4_K_M" in str(caught.value.hint)


def test_gpu_refuses_types_without_kernel(tmp_path: Path) -> None:
    folder = resolve_model_dir(str(write_gguf(built("llama"), tmp_path / "base.gguf", "Q4_1")))
    with pytest.raises(LoraserveError, match="weights in Q4_1, which aren't served on GPUs yet"):
        check_gpu_blocks(read_config(folder).quantization)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1"])
def test_activations_are_rounded_in_groups_by_default(form: str, tmp_path: Path) -> None:
    folder = resolve_model_dir(str(write_gguf(built("llama"), tmp_path / "base.gguf", form)))
    width = {"Q8_0": "8"}.get(form, "4")
    assert load(folder).spec.arithmetic == f"w{width}a8-g32-o2+w{width}a8-g32"
    assert load(folder, activation_dtype="float").spec.arithmetic == f"w{width}a16"


def test_float_base_reads_the_same_weights(tmp_path: Path) -> None:
    model = built("llama")
    folder = resolve_model_dir(str(write_gguf(model, tmp_path / "base.gguf", "Q4_1")))
    dequantized(model, "Q4_1")
    base = OriginalBase(folder, torch.device("cpu"))
    attention = model.model.layers[1].self_attn
    found = torch.cat(list(base.weight_rows(1, "q_proj")))
    torch.testing.assert_close(found, attention.q_proj.weight, rtol=0, atol=1e-6)
    table = torch.cat(list(base.weight_rows(0, "embed_tokens")))
    torch.testing.assert_close(table, model.model.embed_tokens.weight, rtol=0, atol=1e-6)


def cut(whole: Path, folder: Path) -> list[Path]:
    """The file in two shards, every second tensor in each."""
    reader, paths = gguf.GGUFReader(whole), [folder / f"base-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for key, field in reader.fields.items():
            if number or key.startswith("GGUF.") or key == "general.architecture":
                continue
            if field.types[0] is gguf.GGUFValueType.ARRAY:
                writer.add_array(key, field.contents())
            else:
                writer.add_key_value(key, field.contents(), field.types[0])
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_shards_are_read_together(tmp_path: Path) -> None:
    model, folder = built("llama"), tmp_path / "shards"
    folder.mkdir()
    cut(write_gguf(model, tmp_path / "whole.gguf", "Q8_0"), folder)
    assert difference(folder, dequantized(model, "Q8_0")) < 1e-4


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1"])
def test_parallel_ranks_match_single_process(form: str, tmp_path: Path, rank_pool: RankPool) -> None:
    model = built("llama tied", hidden_size=128, intermediate_size=128)
    folder = resolve_model_dir(str(write_gguf(model, tmp_path / "base.gguf", form)))
    expected = logits(load(folder, activation_dtype="float"))
    with rank_pool.load(folder, 2, activation_dtype="float") as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_ranks_cut_no_group(tmp_path: Path) -> None:
    folder = resolve_model_dir(str(write_gguf(built("llama"), tmp_path / "base.gguf", "Q8_0")))
    blueprint = draw(read_config(folder), read_headers(folder), "none")
    with pytest.raises(LoraserveError, match=r"48 inputs of .*down_proj, whose scales are of groups of 32"):
        check_grid(blueprint, Grid(2, 1))


@pytest.mark.parametrize(("layers", "scalar"), [(26, 256), (46, 144)])
def test_gemmas_scores_have_published_scale(layers: int, scalar: int, tmp_path: Path) -> None:
    sizes = {"block_count": layers, "embedding_length": 4608, "attention.head_count": 32, "feed_forward_length": 64}
    settings = {"attention.key_length": 256, "attention.value_length": 256, "context_length": 128}
    metadata = {f"gemma2.{name}": value for name, value in {**sizes, **settings}.items()}
    metadata |= {"general.architecture": "gemma2", "gemma2.attention.layer_norm_rms_epsilon": 1e-6}
    table = GgufTensor("token_embd.weight", TYPES[0], (8, 4608), 0, 0, tmp_path)
    config = make_config(Gguf((tmp_path,), metadata, {table.name: table}))
    assert config["query_pre_attn_scalar"] == scalar


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    first, second = cut(write_gguf(built("llama"), tmp_path / "whole.gguf"), folder)
    second.unlink()
    with pytest.raises(LoraserveError, match=r"one of 2 shards, and base-00002-of-00002\.gguf isn't beside it"):
        resolve_model_dir(str(first))


def test_missing_file_is_named(tmp_path: Path) -> None:
    file = write_gguf(built("llama"), tmp_path / "base.gguf")
    folder = resolve_model_dir(str(file))
    file.unlink()
    with pytest.raises(LoraserveError, match=r"base\.gguf, which has the weights, isn't there any more"):
        load(folder)


def test_folder_with_single_file_is_a_base(tmp_path: Path) -> None:
    write_gguf(built("llama"), tmp_path / "base.gguf")
    (tmp_path / "mmproj-base.gguf").write_bytes(b"GGUF")
    # as repositories of GGUF files have it
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(resolve_model_dir(str(tmp_path))).hidden_size == 64


def test_safetensors_go_before_gguf(tmp_path: Path) -> None:
    write_gguf(built("llama"), tmp_path / "base.gguf")
    save_model(built("llama"), tmp_path)
    assert resolve_model_dir(str(tmp_path)) == tmp_path


def test_folder_with_two_files_names_each_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(built("llama"), tmp_path / f"{name}.gguf")
    with pytest.raises(LoraserveError, match=r"has 2 GGUF files: a\.gguf, b\.gguf") as caught:
        resolve_model_dir(str(tmp_path))
    assert str(tmp_path / "a.gguf") in str(caught.value.hint)


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "base.gguf"
    first = resolve_model_dir(str(write_gguf(built("llama"), file)))
    assert resolve_model_dir(str(file)) == first
    model = built("llama", num_hidden_layers=3)
    file.unlink()
    assert difference(write_gguf(model, file), model) < 1e-4


@pytest.mark.parametrize(
    "name", ["rope.scaling.type", "tokenizer.ggml.pre", "attention.value_length", "sliding_window"]
)
def test_unknown_setting_is_refused(name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "rope.scaling.type": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        "tokenizer.ggml.pre": {"tokenizer.ggml.pre": "superbpe"},
        "attention.value_length": {"llama.attention.value_length": 16},
        "sliding_window": {"llama.attention.sliding_window": 64},
    }
    file = write_gguf(built("llama"), tmp_path / "base.gguf", metadata=values[name])
    with pytest.raises(LoraserveError, match=name):
        resolve_model_dir(str(file))
