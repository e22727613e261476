"""Names of tensors by which files that aren't read are recognized, and what to do with each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loraserve.adapters.format.tensor_names import PREFIX
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterUnsupported


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """File of another tool.

    Attributes:
        name: matches a name that its files alone have.
        what: completes "…, which is the name of a tensor in".
        cure: what to do instead.
    """

    name: re.Pattern[str]
    what: str
    cure: str


_IMAGE_MODEL = "This server answers with language models; an image model's adapter needs diffusers or its own server."
FORMATS: tuple[ForeignFormat, ...] = (
    ForeignFormat(re.compile(r"lora_(unet|te\d?|transformer)_\w+\.\w+(\.weight)?"), "kohya's LoRA", _IMAGE_MODEL),
    ForeignFormat(
        re.compile(r"(unet|transformer|text_encoder(_2)?)\..+\.(lora_[AB]\.weight|lora\.(up|down)\.weight|alpha)"),
        "diffusers' LoRA",
        _IMAGE_MODEL,
    ),
    ForeignFormat(re.compile(r".+\.processor\.\w+_lora\.(up|down)\.weight"), "diffusers' older LoRA", _IMAGE_MODEL),
    ForeignFormat(
        re.compile(r"(decoder\.)?layers\.\d+\.(attn|mlp)\.\w+\.lora_[ab]\.weight"),
        "torchtune's own checkpoint",
        "Push the adapter_config.json and adapter_model.safetensors that torchtune's FullModelHFCheckpointer writes.",
    ),
    ForeignFormat(
        re.compile(r"transformer\.h\.\d+\..+\.lora_[AB]"),
        "LitGPT's checkpoint",
        "Merge it with litgpt merge_lora, and serve the result as a base.",
    ),
    ForeignFormat(
        re.compile(r"(module\.)?decoder\.layers\.\d+\..+\.adapter\.linear_(in|out)\.weight"),
        "NeMo's or Megatron's checkpoint",
        "Export it with NeMo's export to Hugging Face PEFT.",
    ),
)
_WHOLE = re.compile(r".+\.layers\.\d+\.(self_attn|mlp|attention|feed_forward)\..+\.weight")
_TRAINED = re.compile(r"(^|\.)(lora_|hada_|lokr_|ia3_|vera_|token_adapter|modules_to_save)")


def refuse_foreign_names(names: Iterable[str]) -> None:
    """Raise an error if the tensors are those of a file that another tool writes.

    Raises:
        AdapterUnsupported: they are; the message has a name, the tool, and what to do.
    """
    listed = list(names)
    for name in listed:
        plain = name.removeprefix(PREFIX)
        for format_ in FORMATS:
            if plain == name and format_.name.fullmatch(name):
                raise AdapterUnsupported(
                    f"{shown(name, 200)} is the name of a tensor in {format_.what}, which isn't read.",
                    hint=format_.cure,
                )
    whole = [name for name in listed if _WHOLE.fullmatch(name)]
    if whole and not any(_TRAINED.search(name) for name in listed):
        raise AdapterUnsupported(
            f"The file holds whole weights, such as {shown(whole[0].removeprefix(PREFIX), 200)}, and nothing of an "
            "adapter: it is a model's checkpoint.",
            hint="Serve it as a base (loraserve serve --model DIR), or save the adapter alone: PEFT's save_pretrained, "
            'in Unsloth save_pretrained_merged(…, save_method="lora").',
        )
