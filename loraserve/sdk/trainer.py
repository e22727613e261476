"""`LoraservePushCallback`: push each checkpoint of a `transformers` or TRL trainer.

It is a callback by its methods: it imports neither transformers nor torch.

    from loraserve.sdk.trainer import LoraservePushCallback

    trainer = SFTTrainer(..., callbacks=[LoraservePushCallback("support", metric="eval_loss")])
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraserve import errors
from loraserve.adapter_folder import CONFIG_FILE, is_weights
from loraserve.contract.adapter import Version
from loraserve.contract.operation import Progress
from loraserve.sdk._sync.client import Client
from loraserve.sdk.config import ClientConfig
from loraserve.sdk.files.peft_directory import EXTRA_FILES, PARSER_FILES, VARIABLES_FILE, find_files
from loraserve.tokenizer_identity import TOKENIZER_FILES

MAX_DELAY_S = 60.0
"""Default of the longest time that one checkpoint's push may hold the training up."""
KEPT_FOLDER = "loraserve-unpushed"
"""Folder in the trainer's output for what wasn't pushed and the trainer would delete."""
MAX_METRIC_TAGS = 32
MAX_TAG_LENGTH = 256
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*([/:][A-Za-z0-9_][A-Za-z0-9._-]*)*"
ALIAS_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
MAX_ADAPTER_NAME_LENGTH = 128
TAG_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"
"""The server's own rules, so that a wrong name is an error before the training."""

_log = logging.getLogger("loraserve.trainer")
_FILES = (CONFIG_FILE, *EXTRA_FILES.values(), *PARSER_FILES, VARIABLES_FILE, *TOKENIZER_FILES)
_EVENT = "on_"
_NO_TAG_LETTER = re.compile(r"[^A-Za-z0-9._/-]")


@dataclass(frozen=True, slots=True)
class PushedCheckpoint:
    """A checkpoint that is a version now; what a gate decides on."""

    client: Client
    """Client of the server that has it, open while the gate runs."""
    version: Version
    directory: Path
    step: int
    metrics: Mapping[str, float]
    """Those of the evaluation at the same step; empty where there was none."""

    @property
    def model(self) -> str:
        """The `model=` that asks exactly this version."""
        return self.version.model


@dataclass(frozen=True, slots=True)
class UnpushedCheckpoint:
    """A checkpoint that isn't a version: where its files are, and how to push them later."""

    directory: Path
    step: int
    reason: str
    command: str


Gate = Callable[[PushedCheckpoint], bool]


@dataclass
class _Turn:
    """One checkpoint's push, on a thread of its own."""

    directory: Path
    step: int
    metrics: Mapping[str, float]
    tags: dict[str, str]
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once the training no longer waits: nothing must change on the server any more."""
    version: Version | None = None
    failure: Exception | None = None
    remarks: list[str] = field(default_factory=list)

    def check_wanted(self, _progress: Progress | None = None) -> None:
        """Stop at the next piece or call after the training went on.

        Raises:
            ClientTimeout: it did.
        """
        if self.given_up.is_set():
            raise errors.ClientTimeout("The training went on without this push.")


class LoraservePushCallback:
    """Push each checkpoint's adapter as a version of `name`, and move an alias to the best.

    Only the process of rank zero pushes. Training never ends because of a push, and no checkpoint's
    push delays it by more than `max_delay_s`: what couldn't be pushed stays on disk, and a warning
    (logger ``loraserve.trainer``) has the command that pushes it later. A wrong configuration, such
    as no key, is an error before the training starts.

    Args:
        name: the adapter.
        alias: moved to a version that is better than the one it points to; None: none is moved.
        metric: name of the evaluation's result that decides, with or without ``eval_``; None: the
            trainer's `metric_for_best_model`; if that is None too, every version is better.
        greater_is_better: None: the trainer's own, else False for names that end with ``loss``.
        gate: asked, after the push and before the alias moves, whether the version may have it. It
            runs on a thread of its own, within `max_delay_s`, while the training waits.
        tags: set on each version, beside the step, the epoch and the metrics.
        max_delay_s: longest time that one checkpoint's push may take.
        base_url, api_key, tenant: as `Client` has them.

    Attributes:
        pushed: the versions of this training, oldest first.
        unpushed: the checkpoints that aren't versions.
    """

    def __init__(
        self,
        name: str,
        *,
        alias: str | None = "live",
        metric: str | None = None,
        greater_is_better: bool | None = None,
        gate: Gate | None = None,
        tags: Mapping[str, str] | None = None,
        max_delay_s: float = MAX_DELAY_S,
        base_url: str | None = None,
        api_key: str | None = None,
        tenant: str | None = None,
    ) -> None:
        if not re.fullmatch(ADAPTER_NAME, name) or len(name) > MAX_ADAPTER_NAME_LENGTH:
            raise errors.ConfigError(
                f"name is {name!r}; it should match {ADAPTER_NAME} "
                f"and have at most {MAX_ADAPTER_NAME_LENGTH} characters."
            )
        if alias is not None and not re.fullmatch(ALIAS_NAME, alias):
            raise errors.ConfigError(f"alias is {alias!r}; it should match {ALIAS_NAME}.")
        for key, value in (tags or {}).items():
            if not re.fullmatch(TAG_NAME, key) or not value.isprintable() or len(value) > MAX_TAG_LENGTH:
                raise errors.ConfigError(
                    f"The tag {key!r} can't be set: its name should match {TAG_NAME}, "
                    f"and its value be one line of at most {MAX_TAG_LENGTH} characters."
                )
        if not 0 < max_delay_s < math.inf:
            raise errors.ConfigError(f"max_delay_s is {max_delay_s}; it should be a number of seconds above 0.")
        if alias is None and (metric is not None or gate is not None):
            raise errors.ConfigError(
                "metric and gate decide whether an alias moves, and alias is None.",
                hint='Name one, such as alias="live", or leave both out.',
            )
        self.name = name
        self.alias = alias
        self.pushed: list[Version] = []
        self.unpushed: list[UnpushedCheckpoint] = []
        self._metric = metric
        self._greater_is_better = greater_is_better
        self._gate = gate
        self._tags = dict(tags or {})
        self._max_delay_s = max_delay_s
        self._address = (base_url, api_key, tenant)
        self._refusal: str | None = None

    def __getattr__(self, event: str) -> Callable[..., None]:
        """Return a method that does nothing, for the trainer's events that no method here takes."""
        if event.startswith(_EVENT):
            return _ignore
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {event!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, alias={self.alias!r})"

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Check the configuration before anything is trained.

        Raises:
            ConfigError: no key, or a URL that is none.
        """
        if state.is_world_process_zero:
            base_url, api_key, tenant = self._address
            config = ClientConfig.resolve(base_url, api_key, tenant, self._max_delay_s, 0)
            if config.api_key is None:
                # the server is on this machine, and would refuse the first push, hours later; where
                # it needs none (--no-auth), any key will do
                raise config.missing_key()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Check the configuration of a callback that was added to a finished trainer.

        Raises:
            ConfigError: as `on_init_end`.
        """
        self.on_init_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Push the checkpoint that was just saved; return within the bound, whatever happens."""
        if not state.is_world_process_zero:
            return
        step = int(state.global_step)
        directory = Path(args.output_dir) / f"checkpoint-{step}"
        metrics = _metrics_at(state.log_history, step)
        turn = _Turn(directory, step, metrics, self._tags | _tags_of(state, metrics))
        if self._refusal is not None:
            self._keep(turn, args, self._refusal)
            return
        metric, is_greater_better = self._rule(args)
        thread = threading.Thread(
            target=self._run, args=(turn, metric, is_greater_better), name="loraserve-push", daemon=True
        )
        thread.start()
        thread.join(self._max_delay_s)
        is_late = thread.is_alive()
        turn.given_up.set()
        version, failure = turn.version, turn.failure
        for remark in turn.remarks:
            _log.warning("%s", remark)
        if version is not None:
            self.pushed.append(version)
        if is_late and version is not None:
            _log.warning(
                "%s is pushed, but the decision on its alias took more than %g s: training goes on, and the alias "
                "stays. Move it later: loraserve adapter alias %s %s %s",
                *(version.model, self._max_delay_s, shlex.quote(self.name), self.alias, version.version),
            )
        elif version is None:
            late = f"the push took more than {self._max_delay_s:g} s (max_delay_s)"
            self._keep(turn, args, late if failure is None or is_late else _reason(failure))
            if isinstance(failure, errors.AdapterUnsupported | errors.AdapterBaseMismatch):
                # a config that one checkpoint is refused for is the others' too
                self._refusal = "the server refused an earlier checkpoint of this training, which has the same config"
        elif failure is not None:
            _log.warning("%s is pushed, but the alias %s stays: %s", version.model, self.alias, _reason(failure))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say what is still to be pushed."""
        if self.unpushed:
            commands = "".join(f"\n  {one.command}" for one in self.unpushed)
            _log.warning("%d checkpoints weren't pushed. To push them:%s", len(self.unpushed), commands)

    def _rule(self, args: Any) -> tuple[str | None, bool]:
        """Return the metric's full name, and whether more of it is better."""
        metric, is_greater_better = self._metric, self._greater_is_better
        if metric is None and self.alias is not None:
            metric = getattr(args, "metric_for_best_model", None)
            if is_greater_better is None:
                is_greater_better = getattr(args, "greater_is_better", None)
        if metric is None:
            return None, True
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        return metric, not metric.endswith("loss") if is_greater_better is None else is_greater_better

    def _run(self, turn: _Turn, metric: str | None, is_greater_better: bool) -> None:
        """Push and decide on the alias; the result or the failure is the turn's."""
        base_url, api_key, tenant = self._address
        try:
            find_files(turn.directory)
            with Client(base_url, api_key=api_key, tenant=tenant, timeout=self._max_delay_s) as client:
                version = client.adapters.push(
                    turn.directory, name=self.name, promote=False, tags=turn.tags, on_progress=turn.check_wanted
                )
                turn.version = version
                if self.alias is not None:
                    self._decide(client, turn, version, metric, is_greater_better)
        except Exception as failure:
            # a gate is the user's own code: whatever it raises mustn't end the training
            turn.failure = failure

    def _decide(
        self, client: Client, turn: _Turn, version: Version, metric: str | None, is_greater_better: bool
    ) -> None:
        """Move the alias if the version is served, better, and passes the gate."""
        alias = self.alias or ""
        if version.is_quarantined or version.version is None:
            turn.remarks.append(f"{version.model} is in quarantine: it isn't served, and {alias} stays.")
            return
        if metric is not None and metric not in turn.metrics:
            found = ", ".join(turn.metrics) or "none"
            turn.remarks.append(
                f"{version.model} has no {metric} (metrics of this step: {found}), so {alias} stays. "
                "Evaluate when you save: set eval_strategy and save_strategy, and their steps, alike."
            )
            return
        turn.check_wanted()
        try:
            now = client.adapters.alias(self.name, alias)
        except errors.AliasNotFound:
            now = None
        if now is not None and now.version == version.version:
            return
        if now is not None and (now.split or now.shadow):
            turn.remarks.append(f"{alias} is split or has a shadow, so it stays; {version.model} is pushed.")
            return
        if now is not None and metric is not None:
            best = _number(client.adapters.version(self.name, now.version).tags.get(_tag_name(metric)))
            new = turn.metrics[metric]
            if best is not None and not (new > best if is_greater_better else new < best):
                return
        if self._gate is not None and not self._gate(
            PushedCheckpoint(client, version, turn.directory, turn.step, turn.metrics)
        ):
            turn.remarks.append(f"{version.model} didn't pass the gate, so {alias} stays.")
            return
        turn.check_wanted()
        client.adapters.set_alias(self.name, alias, version.version, if_match=None if now is None else now.etag)

    def _keep(self, turn: _Turn, args: Any, reason: str) -> None:
        """Keep the checkpoint's adapter, remember it, and say how to push it later."""
        directory = turn.directory
        if getattr(args, "save_total_limit", None) is not None and directory.is_dir():
            # the trainer deletes its older checkpoints itself
            try:
                directory = _copy(directory, Path(args.output_dir) / KEPT_FOLDER / directory.name)
            except OSError as error:
                _log.warning("%s couldn't be copied, and save_total_limit may delete it: %s", directory, error)
        words = ["loraserve", "adapter", "push", str(directory.absolute()), "--name", self.name, "--no-promote"]
        for key, value in turn.tags.items():
            words += ["--tag", f"{key}={value}"]
        kept = UnpushedCheckpoint(directory, turn.step, reason, shlex.join(words))
        self.unpushed.append(kept)
        _log.warning(
            "The checkpoint of step %d wasn't pushed: %s Training goes on, and the adapter stays in %s. "
            "Push it later: %s",
            *(turn.step, reason if reason.endswith(".") else f"{reason}.", directory, kept.command),
        )


def _ignore(*_arguments: object, **_named: object) -> None:
    """Do nothing at an event."""


def _metrics_at(log_history: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Return the finite results of the evaluations at `step`."""
    found: dict[str, float] = {}
    for entry in log_history:
        if entry.get("step") == step:
            for key, value in entry.items():
                number = _number(value) if key.startswith("eval_") else None
                if number is not None:
                    found[key] = number
    return found


def _tags_of(state: Any, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the tags of a checkpoint: its step, its epoch, and its metrics."""
    tags = {"step": str(int(state.global_step))}
    if state.epoch is not None:
        tags["epoch"] = f"{state.epoch:.4g}"
    for key, value in list(metrics.items())[:MAX_METRIC_TAGS]:
        # all digits: later checkpoints are compared with the tag
        tags[_tag_name(key)] = repr(value)
    return tags


def _tag_name(metric: str) -> str:
    """Return the tag that holds a metric, whose name may have any letters."""
    return _NO_TAG_LETTER.sub("_", metric)[:63]


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _copy(source: Path, target: Path) -> Path:
    """Copy the adapter's files, without optimizer states and the like."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and (path.name in _FILES or is_weights(path.name)):
            shutil.copyfile(path, target / path.name)
    return target


def _reason(failure: Exception) -> str:
    """Return what went wrong, and what to do."""
    if isinstance(failure, errors.LoraserveError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
