"""The engine's process: `python -m pdserve.fleet.engine_main ENDPOINT_FILE VLLM_ARGUMENTS…`.

Binds the private port, publishes it, then becomes vLLM's own OpenAI server on that socket. Nothing listens before the model is loaded:
until then a connection is refused. Knows nothing of the process above it.
"""

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pdserve.fleet.endpoint import Endpoint, publish
from pdserve.fleet.processes import MARK

log = logging.getLogger("pdserve.fleet.engine")


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def parse_engine_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse vLLM's flags with vLLM's own parser; exits with its message on a flag it does not know."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options: argparse.Namespace = make_arg_parser(FlexibleArgumentParser(prog="pdserve.fleet.engine_main")).parse_args(list(arguments))
    validate_parsed_serve_args(options)
    return options


async def serve(endpoint_file: Path, options: argparse.Namespace) -> None:
    """Bind, publish, load the model and serve until SIGTERM."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server

    signal.signal(signal.SIGTERM, _interrupt)
    _, listener = setup_server(options, reuse_port=False)
    options.port = listener.getsockname()[1]
    publish(endpoint_file, Endpoint(incarnation=os.environ[MARK], host=options.host, port=options.port, pid=os.getpid()))
    await run_server_worker(f"http://{options.host}:{options.port}", listener, options)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """Unwind a start-up that SIGTERM hits; once it serves, vLLM handles the signal itself."""
    raise KeyboardInterrupt


def main() -> None:
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    log.info("open files limit raised to %d", raise_open_files_limit())
    cli_env_setup()
    endpoint_file, *arguments = sys.argv[1:]
    uvloop.run(serve(Path(endpoint_file), parse_engine_arguments(arguments)))


if __name__ == "__main__":
    main()
