"""How a process of pdserve logs: one JSON object per line, with time, level, event and process.

Owns the configuration of structlog and of the standard library's root logger in this process. No prompt, no answer and no key is ever logged:
fields with such names are dropped here, whoever passes them, and a process that handles prompts logs where an error came from, but not what its
message says: messages quote values.
"""

import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from pdserve.errors import PdserveError

PRIVATE_FIELDS = frozenset({"prompt", "messages", "content", "text", "body", "secret", "api_key", "authorization", "cache_salt"})


def configure(process: str, path: Path | None, *, handles_prompts: bool = False) -> None:
    """Set up logging of this process; a later call replaces an earlier one.

    Args:
        process: name of the process in every line, e.g. ``router``.
        path: file to append to, created if need be; None writes to stderr.
        handles_prompts: leave out the messages of errors that are not our own.
    """
    file: BinaryIO = sys.stderr.buffer if path is None else path.open("ab")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _stamp(process),
            drop_private,
            format_privately if handles_prompts else structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dump),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.BytesLoggerFactory(file=file),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _ToStructlog)]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(_ToStructlog(None if path is None else file))
    root.setLevel(logging.WARNING)


def drop_private(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove fields that could hold a prompt, an answer or a key."""
    return {name: value for name, value in event.items() if name not in PRIVATE_FIELDS}


def format_privately(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by its type and where it came from. The message is told of our own errors and the system's only."""
    given = event.pop("exc_info", None)
    if given:
        error = given if isinstance(given, BaseException) else given[1] if isinstance(given, tuple) else sys.exc_info()[1]
        event["exception"] = "\n".join(_told(error)) if error is not None else ""
    return event


def _told(error: BaseException) -> Iterator[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _told(cause)
        yield "which led to"
    yield from (line.rstrip() for line in traceback.format_tb(error.__traceback__))
    yield f"{type(error).__name__}: {error}" if isinstance(error, PdserveError | OSError) else type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _told(inner)


class _ToStructlog(logging.Handler):
    """Brings the lines of libraries that use `logging` into the same file and form. Closes the file it was given."""

    def __init__(self, file: BinaryIO | None) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        level = min(record.levelno // 10 * 10, logging.CRITICAL)
        try:
            structlog.get_logger().log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:
            # A handler never raises into the library that logs: `logging` reports the bad line by itself.
            self.handleError(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _stamp(process: str) -> Processor:
    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    return add_process


def _dump(event: EventDict, **_options: Any) -> bytes:
    return orjson.dumps(event, default=str)
