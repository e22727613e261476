import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine.output import StopStrings


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
def test_the_cut_does_not_depend_on_how_the_text_arrives(stop, deltas):
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


def test_no_more_is_held_back_than_could_begin_a_stop_string():
    strings = StopStrings(["STOP"])
    assert strings.push("hello ST") == ("hello ", None)
    assert strings.push("A") == ("STA", None)
