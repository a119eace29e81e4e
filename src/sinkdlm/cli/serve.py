"""The commands that serve models: `serve`, and `inspect`, which opens the page."""

from typing import Annotated

import typer
from typer import Argument

from sinkdlm.cli.loading import choose_device, load_model, name_models
from sinkdlm.cli.options import Bos, Computing, Device, Exact, option
from sinkdlm.errors import UserError

_MODELS = Argument(metavar="CKPT [CKPT2]", help="Checkpoints, or anything that `convert` reads.")


def serve(
    context: typer.Context,
    models: Annotated[list[str], _MODELS],
    host: Annotated[str, option("The address to listen on; by default this machine alone.")] = "127.0.0.1",
    port: Annotated[int, option("0: any that is free; it is printed.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, option("What clients must send.", envvar="SINKDLM_API_KEY")] = None,
    cors: Annotated[list[str] | None, option("An origin that may read answers: https://example.org.", metavar="ORIGIN")] = None,
    max_queue: Annotated[int, option("Requests that may wait; more get 429.", min=1)] = 256,
    max_batch: Annotated[int, option("Texts that are written at the same time.", min=1)] = 64,
    batch_tokens: Annotated[int, option("Tokens in a forward: texts times the longest.", min=1)] = 16_384,
    max_length: Annotated[int | None, option("Tokens of a text with its prompt; by default all it reads.", min=1)] = None,
    max_steps: Annotated[int, option("Denoising steps that a request may ask for.", min=1)] = 1024,
    max_n: Annotated[int, option("Texts for one prompt.", min=1, max=64)] = 16,
    timeout: Annotated[float, option("Seconds that a request may take, waiting included.", min=0.1)] = 300.0,
    deterministic: Exact = False,
    bos: Bos = None,
    browser: Annotated[bool | None, option("Open the page; by default `inspect` does.", "--browser/--no-browser")] = None,
    device: Device = None,
    dtype: Computing = "auto",
) -> None:
    """Serve one or two models over HTTP, in OpenAI's manner: completions, chat, streams, metrics."""
    if len(models) > 2:
        raise UserError(f"{len(models)} checkpoints: one process serves one or two")
    if api_key == "":
        raise UserError("--api-key: is empty, and would let everybody in; give one, or leave it out")
    try:
        from sinkdlm.serving.server import LOOPBACK, address_of, bind, make_site, run
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is not installed; pip install 'sinkdlm[serve]'") from None
    from sinkdlm.serving.engine import Capacity
    from sinkdlm.serving.served import Limits
    from sinkdlm.serving.site import Settings

    names = name_models(models)
    local = host in LOOPBACK
    hosts = frozenset(LOOPBACK) if local and api_key is None else None
    with bind(host, port) as bound:  # a port that is taken is said before models are read
        if not local and api_key is None:
            typer.echo(f"sinkdlm: warning: anybody who reaches {host} can use this server; set --api-key", err=True)
        place = choose_device(device)
        site = make_site(
            {name: load_model(path, place, dtype) for name, path in zip(names, models, strict=True)},
            Capacity(rows=max_batch, tokens=batch_tokens, waiting=max_queue, seconds=timeout),
            Limits(length=max_length, steps=max_steps, n=max_n),
            Settings(api_key=api_key, hosts=hosts, origins=tuple(cors or ())),
            deterministic=deterministic,
            bos=bos,
        )

        def ready() -> None:
            typer.echo(f"serving {', '.join(names)} at {address_of(bound)} on {place}")
            if context.info_name == "inspect" if browser is None else browser:
                _open_page(address_of(bound))

        run(site, bound, ready)


def _open_page(address: str) -> None:
    """In a thread of its own: some browsers hold on to whoever opens them, and the server has started."""
    import threading
    import webbrowser

    url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    def open_it() -> None:
        if not webbrowser.open(url):
            typer.echo(f"no browser here could be opened: open {url} in one", err=True)

    threading.Thread(target=open_it, daemon=True).start()
