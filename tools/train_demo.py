"""Train the demo's adapters on SmolLM2-135M-Instruct with PEFT, on one core.

    python -P tools/train_demo.py [NAME...]            # train, and score with transformers
    python -P tools/score_demo.py [NAME...]            # score what the demo's server answers

Needs `loraserve[demo-train]`. The base is the demo's GGUF file, which transformers dequantizes.
Three things keep the cost to some minutes. Only the upper layers are trained: what the layers below
make of a row is computed once. Questions of a row share their common beginnings (system prompt,
tools, table): a row is a tree of tokens, of which each sees its ancestors alone, as if every
question stood alone. And the head reads the positions before answers' tokens only.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from loraserve.api.inference.chat.tools import read_tools
from loraserve.demo.demo_model import DemoAnswer, Question, ToolRequest
from loraserve.demo.smollm.adapter_card import AdapterCard, AdapterRecipe, TaskScore, write_adapter_card
from loraserve.demo.smollm.base_file import find_base_file
from loraserve.demo.smollm.smollm_demo import BASE_NAME, SCORE_SEED, adapter_dir
from loraserve.demo.smollm.tasks.calls import reference
from loraserve.demo.smollm.tasks.table import TASKS
from loraserve.demo.smollm.tasks.task import Task, draw_questions, held_out_questions
from loraserve.model.gguf.gguf_folder import gguf_folder
from loraserve.text.chat_format import ChatFormat
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, TextDelta

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEED = 1
NUM_SCORED = 24
BATCH_SIZE = 12
MAX_NEW_TOKENS = 72
CONTINUED_SHARE = 0.25
"""Share of questions that continue a conversation."""
RECIPES = {
    "sql": AdapterRecipe(num_rows=80, num_epochs=2),
    "json": AdapterRecipe(num_rows=60, num_epochs=1),
    "french": AdapterRecipe(num_rows=70, num_epochs=3),
    "pirate": AdapterRecipe(num_rows=36, num_epochs=2),
    "subject": AdapterRecipe(num_rows=60, num_epochs=2),
    "tools": AdapterRecipe(num_rows=32, num_epochs=2, row_tokens=1024),
}


class TokenTree:
    """A row of questions, of which those that begin alike share their first tokens.

    Attributes:
        targets: (index of a token, token that follows) in answers.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.targets: list[tuple[int, int]] = []
        self.num_questions = 0
        self._children: dict[tuple[int, int], int] = {}

    def num_new(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens a question would add."""
        node = -1
        for index, token_id in enumerate(token_ids):
            found = self._children.get((node, token_id))
            if found is None:
                return len(token_ids) - index
            node = found
        return 0

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a question with the answer that is to be learnt, whose last token ends it."""
        self.num_questions += 1
        node = -1
        for position, token_id in enumerate((*prompt, *answer)):
            if position >= len(prompt):
                self.targets.append((node, token_id))
            child = self._children.get((node, token_id))
            if child is None:
                child = self._children[node, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(node)
                self.positions.append(position)
            node = child

    def sees(self) -> Tensor:
        """Return [num_tokens, num_tokens] bool: whether a token attends to another."""
        seen = torch.eye(len(self.token_ids), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                seen[index] |= seen[parent]
        return seen


class Prompts:
    """Prompts and answers as the server writes and reads them."""

    def __init__(self, file: Path) -> None:
        folder = gguf_folder(file)
        self.tokenizer = Tokenizer(folder)
        self.template = ChatTemplate(folder, self.tokenizer)
        self.chat_format = ChatFormat(self.template, self.tokenizer)
        end = self.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        self.end = end

    def prompt(self, question: Question, before: Question | None = None) -> list[int]:
        """Render a question, maybe after another one and its answer."""
        tool_use = read_tools(list(question.tools), self.chat_format)
        turns = [{"role": "user", "content": question.prompt}]
        if before is not None:
            turns = [
                {"role": "user", "content": before.prompt},
                {"role": "assistant", "content": before.expected},
                *turns,
            ]
        messages, tools = self.chat_format.shown(turns, tool_use)
        return self.tokenizer.encode(self.template.render(messages, tools=tools), add_special_tokens=False)

    def answer(self, question: Question) -> list[int]:
        text = question.expected
        if question.tools:
            learnt = reference(question)
            if isinstance(learnt, DemoAnswer):
                text = learnt.text
            else:
                call = json.dumps({"name": learnt[0], "arguments": learnt[1]}, ensure_ascii=False)
                text = f"<tool_call>\n{call}\n</tool_call>"
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end]

    def read(self, question: Question, token_ids: Sequence[int]) -> DemoAnswer:
        """Read an answer's tokens as the API does."""
        text = self.tokenizer.decode(token_ids)
        tool_use = read_tools(list(question.tools), self.chat_format)
        answer_format = self.chat_format.answer_format("", tool_use)
        if answer_format is None:
            return DemoAnswer(text)
        parser = answer_format.parser()
        content, names, arguments = "", [], []
        for delta in (*parser.push(text), *parser.finish()):
            match delta:
                case TextDelta(part):
                    content += part
                case CallStart():
                    names.append(delta.name)
                    arguments.append("")
                case ArgumentsDelta(index, part):
                    arguments[index] += part
        return DemoAnswer(content, tuple(map(ToolRequest, names, arguments)))


def draw_rows(task: Task, prompts: Prompts, recipe: AdapterRecipe) -> list[TokenTree]:
    """Fill rows with training questions; those of a row have the same tools.

    Some continue the conversation of the question before them, as in a session. In the tree, that
    costs no more tokens.
    """
    rows: list[TokenTree] = []
    opened: dict[str, TokenTree] = {}
    rng = random.Random(f"turns {task.name} {SEED}")
    before: Question | None = None
    for question in draw_questions(task, "train", SEED):
        continued = before if rng.random() < CONTINUED_SHARE and not question.tools else None
        prompt, answer = prompts.prompt(question, continued), prompts.answer(question)
        before = question
        tree = opened.setdefault(repr(question.tools), TokenTree())
        if tree.token_ids and len(tree.token_ids) + tree.num_new([*prompt, *answer]) > recipe.row_tokens:
            rows.append(tree)
            if len(rows) == recipe.num_rows:
                return rows
            tree = opened[repr(question.tools)] = TokenTree()
            prompt = prompts.prompt(question)
        tree.add(prompt, answer)
    raise AssertionError("draw_questions doesn't end")


def load_base(file: Path) -> Any:
    """Load the base in float32, as transformers dequantizes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    # its weights are plain floats now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


class RowRunner:
    """Run the layers of a Llama on a row's tree."""

    def __init__(self, model: Any, row: TokenTree) -> None:
        self._model = model
        self._ids = torch.tensor([row.token_ids])
        self._positions = torch.tensor([row.positions])
        self._sees = row.sees()[None, None]

    def run(self, hidden: Tensor | None, first: int, last: int) -> Tensor:
        """Run the layers from `first` to before `last`; hidden None: on the embedding."""
        inner = self._model.model
        if hidden is None:
            hidden = inner.embed_tokens(self._ids)
        angles = inner.rotary_emb(hidden, position_ids=self._positions)
        for layer in inner.layers[first:last]:
            hidden = layer(hidden, attention_mask=self._sees, position_ids=self._positions, position_embeddings=angles)
        return hidden


def fit(model: Any, rows: Sequence[TokenTree], recipe: AdapterRecipe, name: str) -> float:
    """Train the model's adapter on the rows; return the last steps' mean loss."""
    num_layers = model.config.num_hidden_layers
    first = num_layers - recipe.num_layers
    runners = [RowRunner(model, row) for row in rows]
    below: list[Tensor] = []
    began = time.monotonic()
    with torch.no_grad():
        for runner in runners:
            below.append(runner.run(None, 0, first))
    print(f"{name}: lower layers of {len(rows)} rows in {time.monotonic() - began:.0f} s", flush=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), weight_decay=0.0, foreach=True
    )
    num_steps = recipe.num_epochs * len(rows)
    warmup = max(1, num_steps // 12)
    losses: list[float] = []
    for step, index in enumerate(_order(len(rows), recipe.num_epochs, name)):
        pace = min((step + 1) / warmup, (num_steps - step) / max(1, num_steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * pace
        nodes = torch.tensor([node for node, _ in rows[index].targets])
        wanted = torch.tensor([token_id for _, token_id in rows[index].targets])
        hidden = runners[index].run(below[index], first, num_layers)
        logits = model.lm_head(model.model.norm(hidden[0, nodes]))
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_gradient_norm)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            took_s = time.monotonic() - began
            print(
                f"{name}: step {step + 1} of {num_steps}, loss {sum(losses[-10:]) / 10:.4f}, {took_s:.0f} s", flush=True
            )
    last = losses[-max(1, num_steps // 10) :]
    return sum(last) / len(last)


def _order(num_rows: int, num_epochs: int, name: str) -> Iterator[int]:
    rng = random.Random(f"order {name} {SEED}")
    for _ in range(num_epochs):
        yield from rng.sample(range(num_rows), num_rows)


@torch.inference_mode()
def score(model: Any, prompts: Prompts, questions: Sequence[Question]) -> TaskScore:
    """Answer held-out questions greedily with transformers and PEFT, and judge the answers."""
    wrong: list[tuple[str, str, str]] = []
    for start in range(0, len(questions), BATCH_SIZE):
        batch = questions[start : start + BATCH_SIZE]
        rows = [prompts.prompt(question) for question in batch]
        length = max(map(len, rows))
        out = model.generate(
            input_ids=torch.tensor([[prompts.end] * (length - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            eos_token_id=prompts.end,
            pad_token_id=prompts.end,
        )
        for question, row in zip(batch, out[:, length:].tolist(), strict=True):
            ids = row[: row.index(prompts.end)] if prompts.end in row else row
            answer = prompts.read(question, ids)
            problem = question.judge(answer)
            if problem is not None:
                wrong.append((question.prompt, str(answer), problem))
    return TaskScore(len(questions), len(questions) - len(wrong), tuple(wrong))


def with_adapter(base: Any, recipe: AdapterRecipe) -> Any:
    """Put a new adapter onto the base's upper layers."""
    num_layers = base.config.num_hidden_layers
    torch.manual_seed(SEED)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(MODULES),
        layers_to_transform=list(range(num_layers - recipe.num_layers, num_layers)),
        layers_pattern="layers",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config)


def train(name: str, file: Path, recipe: AdapterRecipe) -> AdapterCard:
    """Train an adapter, write it and its card, and return the card."""
    began = time.process_time()
    task, prompts = TASKS[name], Prompts(file)
    rows = draw_rows(task, prompts, recipe)
    num_questions = sum(row.num_questions for row in rows)
    num_tokens = sum(len(row.token_ids) for row in rows)
    print(f"{name}: {num_questions} questions, {num_tokens} tokens in {len(rows)} rows", flush=True)
    base = load_base(file)
    model = with_adapter(base, recipe)
    loss = fit(base, rows, recipe, name)
    training_s = time.process_time() - began
    model.eval()
    directory = adapter_dir(name)
    # what is shipped is what is scored
    save(model, directory)
    found = score(model.float(), prompts, held_out_questions(task, NUM_SCORED, SCORE_SEED))
    card = AdapterCard(
        name=name,
        recipe=recipe,
        seed=SEED,
        num_questions=num_questions,
        num_tokens=num_tokens,
        last_loss=round(loss, 5),
        training_s=round(training_s),
        transformers=found,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    )
    write_adapter_card(directory, card)
    print(f"{name}: {found.num_right} of {found.num_questions} right, {training_s:.0f} s of a core", flush=True)
    for prompt, answer, problem in found.wrong:
        print(f"    {prompt!r} → {answer!r}: {problem}", flush=True)
    return card


def save(model: Any, directory: Path) -> None:
    """Write an adapter in bfloat16, in PEFT's format."""
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)
    path = directory / "adapter_config.json"
    # PEFT writes this machine's path, and a set in whatever order it has this time
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields |= {"base_model_name_or_path": BASE_NAME, "target_modules": list(MODULES)}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    # a request that sets no temperature gets the likeliest answer
    (directory / "generation_config.json").write_text('{"do_sample": false}\n', encoding="utf-8")
    for file in directory.iterdir():
        file.chmod(0o644)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TASKS)}; default: all")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(TASKS))
    if unknown:
        parser.error(f"there is no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    file = find_base_file(print)
    cards = [train(name, file, RECIPES[name]) for name in options.names or TASKS]
    return 0 if all(card.transformers.is_good for card in cards) else 1


if __name__ == "__main__":
    sys.exit(main())
