"""Score a demo pack: the share of answers that are exactly right, on prompts unseen in training.

``python -m loraserve.demo.score [PACK]``.

Every answer is decoded greedily by transformers and PEFT in float32, and once more with the base's
linears as an int8 server has them: weights rounded to int8 per output row, activations per token.
Needs the extra `demo-train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

from loraserve.demo.card import Score
from loraserve.demo.frames import STYLES, Frame, Style, fresh_prompts
from loraserve.demo.pack import adapter_dirs, base_dir, pack_dir
from loraserve.demo.pack_training.pack_tokenizer import END, PAD, load_tokenizer, token_id

NUM_PROMPTS = 96
PROMPT_SEED = 1
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A model's answer, and its confidence at the least certain token.

    The confidence is the lead of the best logit over the second.
    """

    text: str
    margin: float


def score_pack(pack: Path, num_prompts: int = NUM_PROMPTS, seed: int = PROMPT_SEED) -> tuple[Score, ...]:
    """Score the base's plain English and every adapter, ordered as `STYLES`."""
    frames = fresh_prompts(num_prompts, seed)
    tokenizer = load_tokenizer(base_dir(pack))
    return tuple(_score(pack, tokenizer, frames, style) for style in STYLES)


def _score(pack: Path, tokenizer: Tokenizer, frames: Sequence[Frame], style: Style) -> Score:
    model = load_model(pack, style)
    prompts = [frame.prompt for frame in frames]
    rights = [frame.render(style) for frame in frames]
    answers = answer_all(model, tokenizer, prompts)
    round_to_int8(model)
    int8_answers = answer_all(model, tokenizer, prompts)
    wrong, wrong_int8 = _wrong(prompts, answers, rights), _wrong(prompts, int8_answers, rights)
    return Score(
        style=style,
        num_prompts=len(frames),
        num_exact=len(frames) - len(wrong),
        num_exact_int8=len(frames) - len(wrong_int8),
        min_margin=round(
            min((a.margin for a, right in zip(answers, rights, strict=True) if a.text == right), default=0), 3
        ),
        wrong=wrong,
        wrong_int8=wrong_int8,
    )


def _wrong(
    prompts: Sequence[str], answers: Sequence[GreedyAnswer], rights: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    rows = zip(prompts, answers, rights, strict=True)
    return tuple((prompt, answer.text) for prompt, answer, right in rows if answer.text != right)


def load_model(pack: Path, style: Style) -> Any:
    """Load the base in float32, with the style's adapter on it (none for ``plain``)."""
    model = transformers.LlamaForCausalLM.from_pretrained(base_dir(pack), dtype=torch.float32)
    if style == "plain":
        return model.eval()
    return peft.PeftModel.from_pretrained(model, str(adapter_dirs(pack)[style]), autocast_adapter_dtype=True).eval()


@torch.inference_mode()
def answer_all(model: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[GreedyAnswer]:
    """Generate the greedy answers, computed in one padded batch."""
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    length = max(map(len, rows))
    token_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        input_ids=token_ids,
        attention_mask=mask,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_ids = out.sequences[:, length:].tolist()
    best = torch.stack(out.logits, dim=1).float().topk(2, dim=-1).values
    leads = (best[..., 0] - best[..., 1]).tolist()
    answers = []
    for ids, row_leads in zip(new_ids, leads, strict=True):
        num_tokens = ids.index(end) if end in ids else len(ids)
        # An answer that doesn't end isn't right, whatever it begins with.
        text = tokenizer.decode(ids[:num_tokens]) if end in ids else tokenizer.decode(ids) + " …"
        answers.append(GreedyAnswer(text, min(row_leads[: num_tokens + 1])))
    return answers


def round_to_int8(model: Any) -> None:
    """Let every linear of the base compute as an int8 server does.

    Its head does too; the adapters' linears don't.
    """
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    # The head shares its weight with the embedding, which stays as it is.
    base.lm_head = _RoundedLinear(base.lm_head.weight.detach())
    for layer in base.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, name, _RoundedLinear(module.weight.detach()))
                elif hasattr(module, "base_layer"):
                    module.base_layer = _RoundedLinear(module.base_layer.weight.detach())


class _RoundedLinear(nn.Linear):
    """``x @ w.T`` with both rounded to 127 steps a side: `w` per output row, `x` per token."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight = nn.Parameter(_rounded(weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(_rounded(x), self.weight)


def _rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round() * scale


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every score and every wrong answer; 0 if all scores are what a pack must have."""
    parser = argparse.ArgumentParser(
        prog="python -m loraserve.demo.score", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("pack", nargs="?", type=Path, default=pack_dir(), help="default: the shipped pack")
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--seed", type=int, default=PROMPT_SEED, help="which fresh prompts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    scores = score_pack(options.pack, options.num_prompts, options.seed)
    for score in scores:
        sys.stdout.write(
            f"{score.style:8} {score.num_exact:4}/{score.num_prompts} = {score.exact:6.1%}   int8 "
            f"{score.exact_int8:6.1%}   "
            f"least margin {score.min_margin}\n"
        )
        for prompt, text in score.wrong:
            sys.stdout.write(f"    {prompt!r} → {text!r}\n")
    return 0 if all(score.is_good for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
