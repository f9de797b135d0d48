"""Starts the controller process and holds its life line."""

import os
import subprocess
from collections.abc import Sequence

from pdserve.cli.controller import LET_GO
from pdserve.control.folder import StateFolder

STOP_LIMIT_S = 90.0
"""a controller that takes longer to end a deployment is killed, and the rest is done without it"""


class Launch:
    """A running controller, and the pipe that it lives by.

    Closing the pipe, or the end of this process by any signal, makes the controller end the deployment.
    """

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self.process = process
        self._lifeline: int | None = lifeline

    def let_go(self) -> None:
        """Leave the deployment running when this process ends."""
        if self._lifeline is not None:
            os.write(self._lifeline, LET_GO)
            self._close_lifeline()

    def stop(self) -> bool:
        """End the deployment and wait for it.

        Returns:
            Whether the controller did it; if not, it was killed, or had died, and leftovers are for the caller.
        """
        self._close_lifeline()
        try:
            return self.process.wait(STOP_LIMIT_S) >= 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def launch(folder: StateFolder, command: Sequence[str], lock_fd: int) -> Launch:
    """Start the controller in a session of its own, so that a terminal's Ctrl-C reaches this process alone.

    Args:
        folder: prepared, its lock held.
        command: the controller's command line, without descriptors.
        lock_fd: the held lock; the controller keeps it when the caller closes it.
    """
    read_end, write_end = os.pipe()
    try:
        with folder.log_path("controller").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--lifeline-fd", str(read_end), "--lock-fd", str(lock_fd)],
                pass_fds=(read_end, lock_fd),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                start_new_session=True,
            )
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Launch(process, write_end)
