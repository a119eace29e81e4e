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
    host: Annotated[str, option("Address to listen on; the default takes only clients on this machine.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 takes a free one and prints it.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, option("Key that clients must send.", envvar="SINKDLM_API_KEY")] = None,
    allow_anyone: Annotated[bool, option("Serve other machines without a key.", "--allow-anyone")] = False,
    cors: Annotated[list[str] | None, option("Origin to allow by CORS, as in https://example.org.", metavar="ORIGIN")] = None,
    max_queue: Annotated[int, option("Requests that may wait; the next gets status 429.", min=1)] = 256,
    max_batch: Annotated[int, option("Number of texts written at the same time.", min=1)] = 64,
    batch_tokens: Annotated[int, option("Tokens per forward: texts times the longest.", min=1)] = 16_384,
    max_length: Annotated[int | None, option("Tokens of prompt and text; by default the context length.", min=1)] = None,
    max_steps: Annotated[int, option("Most denoising steps that a request may ask for.", min=1)] = 1024,
    max_n: Annotated[int, option("Most texts per prompt.", min=1, max=64)] = 16,
    cache_memory: Annotated[
        float | None,
        option("GiB for keys and values kept between steps; by default half of a GPU's free memory, 4 on a CPU.", min=0),
    ] = None,
    timeout: Annotated[float, option("Seconds that a request may take, waiting included.", min=0.1)] = 300.0,
    lenient: Annotated[bool, option("Leave out request fields of other servers that this one lacks.", "--lenient")] = False,
    deterministic: Exact = False,
    bos: Bos = None,
    browser: Annotated[bool | None, option("Open the page; by default only `inspect` does.", "--browser/--no-browser")] = None,
    device: Device = None,
    dtype: Computing = "auto",
) -> None:
    """Serve one or two models over OpenAI's HTTP API: completions, chat, streams; with metrics and health."""
    if len(models) > 2:
        raise UserError(f"{len(models)} checkpoints: a process serves one or two; start another for more")
    if api_key == "":
        raise UserError("--api-key: an empty key would let everybody in; give one, or leave it out")
    try:
        from sinkdlm.serving.server import LOOPBACK, address_of, bind, is_local, make_site, run
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is not installed; pip install 'sinkdlm[serve]'") from None
    from sinkdlm.serving.engine import Capacity
    from sinkdlm.serving.served import Limits
    from sinkdlm.serving.site import Settings

    names = name_models(models)
    with bind(host, port) as bound:  # report a taken port before reading models
        local = is_local(bound)
        if not (local or api_key or allow_anyone):
            raise UserError(f"--host {host}: anybody who reaches it could use this server; set --api-key, or give --allow-anyone")
        hosts = frozenset((*LOOPBACK, host.lower())) if local and api_key is None else None
        place = choose_device(device)
        site = make_site(
            {name: load_model(path, place, dtype, writes=True) for name, path in zip(names, models, strict=True)},
            Capacity(
                rows=max_batch,
                tokens=batch_tokens,
                waiting=max_queue,
                seconds=timeout,
                cache_bytes=None if cache_memory is None else int(cache_memory * (1 << 30)),
            ),
            Limits(length=max_length, steps=max_steps, n=max_n),
            Settings(api_key=api_key, hosts=hosts, origins=tuple(cors or ()), lenient=lenient),
            deterministic=deterministic,
            bos=bos,
        )

        def ready() -> None:
            typer.echo(f"serving {', '.join(names)} at {address_of(bound)} on {place}")
            if context.info_name == "inspect" if browser is None else browser:
                _open_page(address_of(bound))

        run(site, bound, ready)


def _open_page(address: str) -> None:
    """Open the page in a thread: some browsers block their caller, and the server must go on."""
    import threading
    import webbrowser

    url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    def open_it() -> None:
        if not webbrowser.open(url):
            typer.echo(f"no browser could be opened here; open {url} yourself", err=True)

    threading.Thread(target=open_it, daemon=True).start()
