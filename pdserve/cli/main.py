"""The `pdserve` command: its sub-commands, and the one place where an error becomes a line and an exit code."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from pdserve import __version__
from pdserve.cli import config, controller, down, keys, receipts, router, status, up, verify
from pdserve.errors import ConfigError, PdserveError

app = typer.Typer(
    name="pdserve",
    help="Prefill/decode serving for vLLM models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Prefill/decode serving for vLLM models."""


app.command("up")(up.up)
app.command("down")(down.down)
app.command("status")(status.status)
app.command("receipts")(receipts.receipts)
app.command("verify")(verify.verify)
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.command("controller", hidden=True)(controller.controller)
app.command("router", hidden=True)(router.router)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        result = app(list(arguments), prog_name="pdserve", standalone_mode=False)
    except ConfigError as error:
        return _fail(str(error), 2)
    except PdserveError as error:
        return _fail(str(error), 1)
    except TyperException as error:
        return _fail(_usage_line(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 1)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the installed script."""
    sys.exit(run(sys.argv[1:]))


def _fail(line: str, code: int) -> int:
    typer.echo(line, err=True)
    return code


def _usage_line(error: TyperException) -> str:
    """Return a bad parameter as `--flag: what is wrong with it`, any other misuse as its message."""
    flags = getattr(getattr(error, "param", None), "opts", None)
    message = error.message if flags else error.format_message()
    line = " ".join(message.split()).rstrip(".")
    return f"{flags[0]}: {line}" if flags else line
