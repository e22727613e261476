"""Log probabilities by transformers and PEFT, of any adapter of a set, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.make_model import MODULES, module_path
from benchmarks.synthetic import Adapters
from loraserve.model.checkpoint.loader import load_model


class PeftScores:
    """A base in float32 with one adapter, whose weights are replaced for each question.

    A quantized base has the values that its codes stand for, as the server computes with them; what
    it computes is float32 here, whatever the server rounds activations to.

    One thread, so that a server on the same machine keeps its cores; one question at a time.
    """

    def __init__(self, model: Path, adapters: Adapters, quantize: str = "none") -> None:
        self._adapters = adapters
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if quantize != "none":
            _quantize(base, model, quantize)
        with TemporaryDirectory(prefix="loraserve-bench-") as folder:
            self._model = PeftModel.from_pretrained(base, str(adapters.write(0, Path(folder)))).eval()
        self._number: int | None = 0
        torch.set_num_threads(1)

    def logprobs(self, number: int, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the log probability of each of the tokens that follow the prompt."""
        scores = self._scores(number, prompt, token_ids)
        return scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()

    def largest_gap(self, number: int, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """Return by how much the tokens fall short of the likeliest ones, at most: 0 if greedy."""
        scores = self._scores(number, prompt, token_ids)
        taken = scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return float((scores.max(dim=1).values - taken).max())

    def _scores(self, number: int, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Return the log probabilities at the tokens' places: [num_tokens, vocab_size]."""
        if number != self._number:
            _, weights = self._adapters.files(number)
            set_peft_model_state_dict(self._model, load(weights))
            self._number = number
        ids = torch.tensor([[*prompt, *token_ids]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)


def _quantize(base: nn.Module, model: Path, quantize: str) -> None:
    """Give the base the weights that the server's decoder computes with, dequantized."""
    decoder = load_model(
        model, model_id="base", dtype=torch.float32, quantize=quantize, device="cpu", max_model_len=None
    )
    places = {
        (layer, module): module_path(layer, module) for layer in range(decoder.spec.num_layers) for module in MODULES
    }
    with torch.no_grad():
        for (layer, module), path in {**places, (0, "lm_head"): "lm_head"}.items():
            weight = torch.cat(list(decoder.weight_rows(layer, module)))
            base.get_parameter(f"{path}.weight").copy_(weight)
