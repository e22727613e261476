"""Convert bases and adapters to GGUF by llama.cpp's own converters: run by the Python of a peer's
environment, which has what those import.

    python peers_converting.py SOURCE PRE_TOKENIZER '[["convert_hf_to_gguf.py", "--outfile", …], …]'

They know a tokenizer's way to split text by a hash of what it makes of an example, and end where
they don't know the hash, as of a tokenizer that was trained for a benchmark: here it's given.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    source, pre_tokenizer, calls = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
    for name, *arguments in calls:
        output = Path(arguments[arguments.index("--outfile") + 1])
        part = output.with_suffix(".part")
        output.parent.mkdir(parents=True, exist_ok=True)
        sys.argv = [name, *(str(part) if argument == str(output) else argument for argument in arguments)]
        runpy.run_path(str(source / name), run_name="__main__")
        part.rename(output)


if __name__ == "__main__":
    main()
