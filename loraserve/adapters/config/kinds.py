"""PEFT's kinds of adapters, served and not served.

``peft_type`` is judged before anything else of an upload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterFormatError, AdapterUnsupported

SERVED: tuple[str, ...] = ("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "VERA")
"""PEFT's names of the kinds that are served."""

NOT_SERVED: Mapping[str, str] = {
    "ADAMSS": "AdaMSS",
    "ADAPTION_PROMPT": "LLaMA-Adapter",
    "BEFT": "BEFT",
    "BOFT": "BOFT",
    "BONE": "Bone",
    "C3A": "C3A",
    "CARTRIDGE": "Cartridges",
    "CPT": "context-aware prompt tuning",
    "DEFT": "DEFT",
    "DELORA": "DeLoRA",
    "FOURIERFT": "FourierFT",
    "FROD": "FRoD",
    "GLORA": "GLoRA",
    "GRALORA": "GraLoRA",
    "HIRA": "HiRA",
    "HRA": "HRA",
    "LILY": "Lily",
    "LN_TUNING": "LayerNorm tuning",
    "MISS": "MiSS",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning",
    "OFT": "OFT",
    "OSF": "OSF",
    "PEANUT": "PEANuT",
    "POLY": "Poly",
    "PREFIX_TUNING": "prefix tuning",
    "PROMPT_TUNING": "prompt tuning",
    "PSOFT": "PSOFT",
    "PVERA": "PVeRA",
    "P_TUNING": "P-tuning",
    "RANDLORA": "RandLoRA",
    "ROAD": "RoAd",
    "SHADOW": "Shadow",
    "SHIRA": "SHiRA",
    "SUPERTUNING": "SuperTuning",
    "TINYLORA": "TinyLoRA",
    "TRAINABLE_TOKENS": "trainable tokens alone",
    "UNILORA": "Uni-LoRA",
    "VBLORA": "VB-LoRA",
    "WAVEFT": "WaveFT",
    "XLORA": "X-LoRA",
}
"""PEFT's names of its other kinds (0.21, and those that older versions had) → what people call
them; a test compares them with the installed PEFT.
"""


def check_kind(config: Mapping[str, Any]) -> None:
    """Raise an error unless the config's kind of adapter is served.

    It is checked before the other fields and the tensors: faults in those mean nothing where the
    kind itself isn't served.

    Raises:
        AdapterFormatError: there is no ``peft_type``, so that it isn't a config that PEFT loads.
        AdapterUnsupported: it is another kind.
    """
    served = f"Served kinds: {', '.join(SERVED[:-1])} and {SERVED[-1]}."
    if "peft_type" not in config and ("architectures" in config or "model_type" in config):
        raise AdapterUnsupported(
            "adapter_config.json is the config.json of a whole model, not an adapter's.",
            hint="Serve it as a base (loraserve serve --model DIR), or save the adapter alone with PEFT's "
            "save_pretrained.",
        )
    if "peft_type" not in config:
        raise AdapterFormatError(f"adapter_config.json has no peft_type, which PEFT needs to load an adapter. {served}")
    kind = config["peft_type"]
    if isinstance(kind, str) and kind in SERVED:
        return
    name = NOT_SERVED.get(kind, "") if isinstance(kind, str) else ""
    label = f" ({name})" if name and name != kind else ""
    raise AdapterUnsupported(f"peft_type is {shown(kind)}{label}, a kind of adapter that isn't served. {served}")
