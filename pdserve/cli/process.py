"""What every long-running process of a deployment does first."""

import resource

import structlog

from pdserve.observe.log import configure


def start_process(name: str, *, handles_prompts: bool = False) -> None:
    """Set up JSON logs on stderr, see `configure`, and raise the limit on open files to what the system allows."""
    configure(name, None, handles_prompts=handles_prompts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    structlog.get_logger("pdserve.process").info("started", process=name, open_files_before=soft, open_files=hard)
