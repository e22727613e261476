"""Machine code of a kernel, as ``cuobjdump -sass`` prints it."""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]+);")
_JUMP = re.compile(r"\bBRA\S*\s.*?0x([0-9a-f]+)")
_LOCAL_ACCESS = re.compile(r"\b(LDL|STL)\b")


def local_accesses(sass: str) -> tuple[int, int]:
    """Return the loads and stores of registers that a kernel keeps in memory, and those in loops.

    A register that is put away before a loop and read behind it costs a program two instructions;
    in a loop it costs as many for each turn. What lies between a jump back and where it goes to
    counts as a loop.
    """
    code = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(sass)]
    loops = [
        (int(found[1], 16), address)
        for address, text in code
        if (found := _JUMP.search(text)) is not None and int(found[1], 16) < address
    ]
    places = [address for address, text in code if _LOCAL_ACCESS.search(text)]
    return len(places), sum(any(first <= place <= last for first, last in loops) for place in places)
