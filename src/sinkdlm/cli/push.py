"""The command `push`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Json, option


def push(
    run: Annotated[Path, Argument(metavar="RUN", help="A run folder, or a checkpoint.")],
    name: Annotated[str, Argument(metavar="OWNER/NAME", help="The model's name on the Hugging Face hub; made if it is not there.")],
    private: Annotated[bool, option("Make the repository private.", "--private")] = False,
    revision: Annotated[str | None, option("Branch to push to; made if it is not there; by default main.")] = None,
    as_json: Json = False,
) -> None:
    """Push a checkpoint to the Hugging Face hub, with a card written from its provenance and evaluations."""
    from sinkdlm.checkpoint import hub
    from sinkdlm.checkpoint.card import read_evaluations, write_card
    from sinkdlm.checkpoint.directory import read_config, read_provenance
    from sinkdlm.errors import CheckpointError
    from sinkdlm.interop.sources import model_in

    found = hub.read_name(name if name.startswith("hf:/") else f"hf://{name}")
    if found is None or found.file is not None or found.revision is not None:
        raise CheckpointError(f"{name}: write owner/name; --revision names a branch")
    folder = model_in(run)
    config, provenance = read_config(folder), read_provenance(folder)
    card = write_card(found.repo, config, provenance, read_evaluations(folder, provenance))
    address = hub.push(folder, found._replace(revision=revision), card, private=private)
    say({"name": str(found), "commit": address}, f"pushed {folder} to {found}: {address}", as_json)
