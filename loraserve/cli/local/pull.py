"""``loraserve pull``: a base or an adapter from the hub, to be there when it is served."""

from __future__ import annotations

from typing import Annotated

import typer

from loraserve.cli.options import FormatOption, reporting


def pull(
    address: Annotated[
        str,
        typer.Argument(
            metavar="hf:ORG/NAME",
            help="A repository of the Hugging Face hub, as hf:ORG/NAME[@REVISION][:PART]; PART is a folder, a GGUF "
            "file, or the quantization in its name.",
            show_default=False,
        ),
    ],
    format: FormatOption = None,
) -> None:
    """Fetch a base or an adapter from the hub into the cache of this machine (HF_HOME).

    The same address stands wherever a path of a base or an adapter may: serve --model, doctor,
    plan, adapter push. What was fetched before isn't fetched again, and an interrupted call goes on
    where it was. HF_TOKEN holds the token of a gated or private repository.
    """
    with reporting(format) as output:
        from loraserve.hub import HubAddress, fetch

        found = fetch(HubAddress.parse(address))
        facts = {"path": str(found.path), "kind": found.kind or "gguf", "revision": found.commit}
        output.done(facts, f"{address} is in {found.path}.")
        match found.kind:
            case "adapter":
                output.note(f"Push it: loraserve adapter push {address} --name NAME")
            case "base":
                output.note(f"Serve it: loraserve serve --model {address}")
            case None:
                output.note(f"Serve it if it is a base (loraserve serve --model {address}), or push it.")
