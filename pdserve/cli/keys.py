"""`pdserve keys`: makes API keys and checks the file they are kept in. A key is shown once and is nowhere afterwards but with whoever has it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError
from pdserve.server.key_file import KeyFile
from pdserve.server.keys import Scope, new_key

app = typer.Typer(no_args_is_help=True, help="Make and check API keys.")


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; keys of one name share limits, queue and cache.")],
    scope: Annotated[list[Scope] | None, typer.Option(help="What it opens; may be given several times. Default: inference.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(metavar="N", help="Limit; none if left out.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Limit of prompt and answer together; none if left out.")
    ] = None,
    expires_in_days: Annotated[
        int | None, typer.Option(metavar="N", help="Days until it opens nothing any more.", min=1, max=36_500)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a new key and its line for the keys file; neither is kept."""
    expires = None if expires_in_days is None else datetime.now(UTC).replace(microsecond=0) + timedelta(days=expires_in_days)
    try:
        key, line = new_key(name, scope or (Scope.INFERENCE,), requests_per_minute, tokens_per_minute, expires)
    except ConfigError as error:
        field = str(error.value).rpartition(", ")[2]
        values = {"name": name, "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        raise ConfigError("NAME" if field == "name" else f"--{field.replace('_', '-')}", values.get(field), error.fix) from error
    if as_json:
        typer.echo(json.dumps({"key": key, "line": line}))
    else:
        typer.echo(f"The key, shown this once:\n\n  {key}\n\nIts line for the file that router.keys_file names:\n\n{line}")


@app.command()
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="Keys file.")]) -> None:
    """Check a keys file; exit code 2 and one line name what is wrong."""
    ring = KeyFile(file).load()
    typer.echo(f"{file}: valid, {len(ring.keys)} keys of {len({key.name for key in ring.keys})} names")
