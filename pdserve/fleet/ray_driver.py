"""This process's connection to Ray: placement groups and named actors of one deployment. Blocking; call it from threads.

Owns the process-wide `ray.init`. Ray is imported when a connection is opened, after its settings are in the environment: it reads them
once. Knows nothing of engines; translates Ray's errors into `FleetError`.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.errors import FleetError
from pdserve.fleet.actor import WorkerActor
from pdserve.fleet.ray_settings import RECONNECT_TIMEOUT_S, actor_environment

_CANCEL_POLL_S = 0.5
_ACTOR_THREADS = 8


class RayDriver:
    """A connection to one cluster, in one namespace. Make it with `connect`."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    @classmethod
    def connect(cls, address: str, namespace: str, environment: Mapping[str, str]) -> "RayDriver":
        """Connect this process.

        Args:
            address: ``host:port`` of the GCS, or ``auto``.
            namespace: holds the deployment's actors and placement groups.
            environment: settings that this process needs first, e.g. the token file; set for good.

        Raises:
            FleetError: nothing answers there, or it refuses the token.
        """
        os.environ.update(environment)
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_TIMEOUT_S))
        import ray
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        # Another module may have imported Ray before the settings were there.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        try:
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise FleetError("ray", f"cannot join {address}: {_first_line(error)}") from error
        return cls(ray)

    def disconnect(self) -> None:
        """Leave the cluster; what is detached stays. Idempotent."""
        self._ray.shutdown()

    def actors(self) -> dict[str, Any]:
        """Return the handles of all live actors of the namespace by name."""
        found = {}
        for name in self._ray.util.list_named_actors():
            try:
                found[name] = self._ray.get_actor(name)
            except ValueError:  # died since it was listed
                continue
        return found

    def place(self, name: str, cpus: float, gpus: int, timeout_s: float, is_cancelled: Callable[[], bool]) -> None:
        """Reserve one bundle on one node, as a detached placement group.

        Raises:
            FleetError: there was no room until the timeout, or it was cancelled; nothing stays reserved.
        """
        bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        group = self._ray.util.placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
        deadline_s = time.monotonic() + timeout_s
        while not group.wait(_CANCEL_POLL_S):
            if is_cancelled() or time.monotonic() > deadline_s:
                self._ray.util.remove_placement_group(group)
                room = {key: self._ray.available_resources().get(key, 0.0) for key in bundle}
                raise FleetError(
                    name, f"no node has room for {bundle} (free: {room}); lower ray.num_cpus_per_worker or start fewer workers"
                )

    def create_actor(self, name: str, cpus: float, gpus: int, *arguments: object) -> Any:
        """Start a detached `WorkerActor` in the bundle that `place` reserved under the same name."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._ray.util.get_placement_group(name), placement_group_bundle_index=0
        )
        actor = self._ray.remote(WorkerActor).options(
            name=name,
            lifetime="detached",
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=_ACTOR_THREADS,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": actor_environment()},
        )
        return actor.remote(*arguments)

    def call(self, name: str, reference: Any, timeout_s: float) -> Any:
        """Wait for an actor's answer. Raises `FleetError`, also the one that the actor raised."""
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except FleetError:
            raise
        except self._ray.exceptions.GetTimeoutError as error:
            raise FleetError(name, f"its actor did not answer within {timeout_s:.0f} s") from error
        except self._ray.exceptions.ActorUnavailableError as error:
            raise FleetError(name, "its actor cannot be reached") from error
        except self._ray.exceptions.RayActorError as error:
            raise FleetError(name, f"its actor died: {_first_line(error)}") from error
        except self._ray.exceptions.RayError as error:
            raise FleetError(name, f"its actor failed: {_first_line(error)}") from error

    def answers(self, references: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return what each actor answered in time: a value, or a `FleetError` if it is dead; the silent ones are left out."""
        ready, _ = self._ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s)
        found: dict[str, Any] = {}
        for name, reference in references.items():
            if reference in ready:
                try:
                    found[name] = self.call(name, reference, timeout_s)
                except FleetError as error:
                    found[name] = error
        return found

    def release(self, name: str, actor: Any | None) -> None:
        """Kill the actor and give its bundle back. Idempotent."""
        if actor is not None:
            self._ray.kill(actor, no_restart=True)
        try:
            group = self._ray.util.get_placement_group(name)
        except ValueError:  # never made, or removed before
            return
        self._ray.util.remove_placement_group(group)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
