"""A process that compiles grammars before the engine sees them: it may be killed at any time.

    python -m loraserve.text.grammar_worker < frames > frames

A client's grammar may take all the time, memory or stack that there is. Here that ends this process
alone. Its frames (`loraserve.text.workers.child`) are JSON, which has integers of any size: first a
`Setup`, then `CheckFormat`s, each answered by a `Checked`.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from loraserve.errors import GrammarTooComplex, InvalidRequest, LoraserveError
from loraserve.limits import KIB, MIB
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of, json_schema_of
from loraserve.text.grammar import PLACE, GrammarCompiler, grammar_error, is_dead_end
from loraserve.text.json_schema.nodes import find_fault, place
from loraserve.text.workers.child import serve
from loraserve.types import Struct

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")

MAX_WORK_BYTES = 512 * MIB
"""Memory that compiling one grammar may take, in addition to the tokenizer's."""
MAX_GRAMMAR_BYTES = 32 * MIB
"""Memory that a compiled grammar may keep."""
NUM_PROBE_TOKENS, MAX_MASK_S = 16, 0.1
"""Tokens for which a grammar is followed here, and the processor time that each mask may take."""
STACK_BYTES = 4 * MIB
"""Stack of the compiling thread, smaller than that of the engine's threads."""
_NICENESS = 10


class Setup(Struct, frozen=True):
    """Tokenizer that grammars are compiled for; see `GrammarCompiler`."""

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckFormat(Struct, frozen=True):
    """Question: the grammar of a format, for the base's tokenizer or a version's.

    Attributes:
        tokenizer: as for `GrammarCompiler.of`.
    """

    wanted: AnswerFormat
    tokenizer: str = ""


class Checked(Struct, frozen=True):
    """Answer to a `CheckFormat`: the grammar, or the error.

    Attributes:
        num_bytes: memory that the compiled grammar keeps; 0: unknown.
        seconds: time of the compilation.
    """

    grammar: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    error_code: str | None = None
    message: str = ""
    hint: str | None = None
    param: str | None = None


def check(compiler: GrammarCompiler, wanted: AnswerFormat) -> Checked:
    """Make the grammar of a format and compile it."""
    started = time.perf_counter()
    try:
        grammar = grammar_of(wanted, lambda text: _is_special(compiler, text))
        before = _allocated_bytes()
        own = json.loads(grammar)["grammars"][1 if wanted.around else 0].get("lark_grammar")
        try:
            matcher = compiler.compile(grammar)
            if wanted.kind is AnswerKind.GRAMMAR:
                compiler.check_attributes(own)
        except InvalidRequest as error:
            error.param = _fault(compiler, wanted)
            error.message = error.message.replace("The grammar", error.param, 1)
            if wanted.around or own != wanted.value:
                # the place is one in a grammar that the client hasn't seen
                error.message = PLACE.sub("", error.message)
            raise
        _probe(matcher, compiler.vocab_size)
        num_bytes = max(0, _allocated_bytes() - before)
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarTooComplex(
                f"The grammar takes {num_bytes / MIB:.0f} MiB; {MAX_GRAMMAR_BYTES // MIB} are the most."
            )
    except LoraserveError as error:
        return Checked(
            seconds=time.perf_counter() - started,
            error_code=error.code,
            message=error.message,
            hint=error.hint,
            param=getattr(error, "param", None) or wanted.param,
        )
    return Checked(grammar=grammar, num_bytes=num_bytes, seconds=time.perf_counter() - started)


def _probe(matcher: LLMatcher, vocab_size: int) -> None:
    """Follow the grammar for a few tokens, as a model would.

    Raises:
        InvalidRequest: nothing satisfies the grammar, or it can't be followed.
        GrammarDeadEnd: an answer that it allows to begin can neither continue nor end.
        GrammarTooComplex: a mask takes longer than one may.
    """
    draw = random.Random(0)  # noqa: S311 (any tokens will do)
    for number in range(NUM_PROBE_TOKENS):
        started = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            if number == 0 and is_dead_end(matcher.get_error()):
                raise InvalidRequest("The grammar can't be used: nothing satisfies it.")
            raise grammar_error(matcher.get_error())
        if time.thread_time() - started > MAX_MASK_S:
            raise GrammarTooComplex("The grammar takes too long to follow.", hint="Simplify it.")
        if matcher.is_stopped():
            return
        # one of the first tokens behind a random place that the grammar allows
        allowed = int.from_bytes(mask, "little") & ((1 << vocab_size) - 1)
        behind = allowed >> (first := draw.randrange(vocab_size)) << first or allowed
        if not behind or not matcher.consume_token((behind & -behind).bit_length() - 1):
            return


def _is_special(compiler: GrammarCompiler, text: str) -> bool:
    tokenizer = compiler.load()
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])


def _fault(compiler: GrammarCompiler, wanted: AnswerFormat) -> str:
    """Find the place of a schema that can't be compiled; of anything else, the field."""

    def is_compilable(part: dict[str, object]) -> bool:
        try:
            compiler.compile(json.dumps({"grammars": [{"json_schema": part}]}))
        except InvalidRequest:
            return False
        return True

    for schema in wanted.schemas:
        if not is_compilable(schema.as_json_schema()):
            return place(schema.param, find_fault(schema.as_json_schema(), is_compilable))
    if wanted.kind is not AnswerKind.JSON_SCHEMA:
        return wanted.param
    return place(wanted.param, find_fault(json_schema_of(wanted), is_compilable))


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"]
    ]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _allocated_bytes() -> int:
    """Count the bytes that are allocated now; 0 where the C library has no such count."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    function.restype = _MallInfo
    info = function()
    return int(info.uordblks) + int(info.hblkhd)


def _on_small_stack(work: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            # a panic too: the process ends, and reports the cause
            errors.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _prepare(setup_frame: bytes) -> Callable[[bytes], bytes]:
    setup = msgspec.json.decode(setup_frame, type=Setup)
    compiler = GrammarCompiler(Path(setup.model_dir), setup.vocab_size, setup.eos_token_ids)
    with suppress(LoraserveError):
        # what is wrong is the answer to the first format
        compiler.load()

    def answer(question: bytes) -> bytes:
        asked = msgspec.json.decode(question, type=CheckFormat)
        own = compiler.of(asked.tokenizer)
        with suppress(LoraserveError):
            # its memory isn't the grammar's
            own.load()
        return msgspec.json.encode(_on_small_stack(partial(check, own, asked.wanted)))

    return answer


def main() -> int:
    """Answer frames until there are no more."""
    return serve(_prepare, max_work_bytes=MAX_WORK_BYTES, niceness=_NICENESS, recursion_limit=2 * KIB)


if __name__ == "__main__":
    sys.exit(main())
