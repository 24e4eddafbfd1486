"""The command `kvobs`."""

import signal
from importlib.util import find_spec
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="kvobs",
    help="See which KV connector served a vLLM request, and why a load was slow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """See which KV connector served a vLLM request, and why a load was slow."""


@app.command()
def demo(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes any free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server up until Ctrl-C, and its folder.")] = False,
    requests: Annotated[int, typer.Option(min=16, max=10_000, help="Requests to send, about.")] = 96,
) -> None:
    """Run a real vLLM server on this CPU with two KV connectors, and see which of them does what."""
    console, errors = Console(), Console(stderr=True)
    # A plain kill must end the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    if find_spec("vllm") is None:
        errors.print("kvobs demo needs vLLM: pip install 'kvobs[engine]' (for CPUs)", style="bold red", markup=False)
        raise typer.Exit(1)
    from kvobs.demo.run import Demo
    from kvobs.demo.server import ServerError

    try:
        Demo(console, port=port, keep=keep, requests=requests).run()
    except KeyboardInterrupt:
        errors.print("\nStopped. Nothing is left running.", style="yellow")
        raise typer.Exit(130) from None
    except ServerError as error:
        headline, _, rest = str(error).partition("\n")
        errors.print(headline, style="bold red", markup=False, soft_wrap=True)
        errors.print(rest, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
