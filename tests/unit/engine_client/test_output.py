import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import OutputProcessor, StopStrings
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, TokenOutput


def feed(stop: list[str], deltas: list[str]) -> tuple[str, str | None]:
    strings = StopStrings(stop)
    text = ""
    for delta in deltas:
        piece, found = strings.push(delta)
        text += piece
        if found is not None:
            return text, found
    return text + strings.finish(), None


@pytest.mark.parametrize(
    ("stop", "deltas", "expected"),
    [
        (["END"], ["ab", "EN", "D", "x"], ("ab", "END")),
        (["END"], ["abE", "NO"], ("abENO", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["xy", "y"], ["axy"], ("a", "xy")),
        (["\n\n"], ["a\n", "\nb"], ("a", "\n\n")),
        ([], ["a", "b"], ("ab", None)),
    ],
)
def test_the_text_ends_before_the_first_stop_string(stop, deltas, expected):
    assert feed(stop, deltas) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("ab", max_size=3)))
def test_stop_cut_is_independent_of_delta_boundaries(stop, deltas):
    text, found = feed(stop, deltas)
    whole = "".join(deltas)
    places = [(whole.find(s) + len(s), s) for s in stop if s in whole]
    if not places:
        assert (text, found) == (whole, None)
    else:
        assert found in stop
        assert whole.startswith(text + found)
        # nothing that was let through held a stop string
        assert not any(s in text for s in stop)


def test_held_text_is_only_possible_stop_prefix():
    strings = StopStrings(["STOP"])
    assert strings.push("hello ST") == ("hello ", None)
    assert strings.push("A") == ("STA", None)


@pytest.fixture
def byte_fallback(tmp_path) -> Tokenizer:
    """A vocabulary as Llama 2's: bytes are tokens of their own,
    and a run of them is text only once another token ends it.
    """
    vocab = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("ending", [FinishReason.LENGTH, FinishReason.STOP])
def test_stop_string_in_finally_released_text_is_found(byte_fallback, ending):
    request = GenerateRequest(
        request_id=RequestId("r"),
        tenant=TenantId("t"),
        adapter=None,
        prompt_token_ids=(1,),
        params=SamplingParams(),
        stop=("\n",),
    )
    newline = ord("\n") + 2
    processor = OutputProcessor(request, byte_fallback)
    tokens = (1, newline, 0) if ending is FinishReason.STOP else (1, newline)
    chunk = processor.push(TokenOutput(request_id=RequestId("r"), token_ids=tokens, finish_reason=ending))
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("a", FinishReason.STOP, "\n")
