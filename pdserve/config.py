"""Every setting of a deployment, once: name, unit, range, default. The only place that reads `PDSERVE_*`.

Precedence: command line > environment (`PDSERVE_ROUTER__PORT=9000`) > YAML file > defaults. Unknown keys are refused.
Knows nothing of how a setting is used.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from pdserve.errors import ConfigError

MIB = 1 << 20
DEFAULT_MODEL = "smollm2-135m-instruct"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PoolConfig(_Section):
    """One role's workers."""

    count: int = Field(1, ge=1, le=1024)
    """workers started in this role"""
    tensor_parallel_size: Literal[1, 2, 4, 8] = 1


class EngineConfig(_Section):
    """What every vLLM engine of the deployment is started with. Defaults are the CPU profile."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """float32 on CPU: bfloat16 tokens depend on the thread count there"""
    block_tokens: int = Field(32, ge=1, le=1024)
    """tokens of one KV block"""
    max_model_len: int = Field(4096, ge=16)
    """longest prompt plus output, tokens"""
    max_num_seqs: int = Field(16, ge=1)
    """requests that run at once in one engine; also the worker's lease limit"""
    max_num_batched_tokens: int = Field(256, ge=1)
    """tokens of one step; bounds the step's time and so how fast an abort takes effect"""
    kv_cache_bytes: int = Field(512 * MIB, ge=MIB)
    """per rank"""
    load_timeout_s: float = Field(900, gt=0)
    """from process start until the engine answers"""
    extra_args: tuple[str, ...] = ()
    """appended to vLLM's command line as they are"""
    env: Mapping[str, str] = {}
    """added to the engine's environment"""


class KvConfig(_Section):
    """The KV transfer layer."""

    transport: Literal["tcp", "shm"] = "tcp"
    slot_bytes: int = Field(4 * MIB, ge=64 << 10, le=256 * MIB)
    """size of one receive slot; a parcel is at most this long"""
    arena_bytes: int = Field(64 * MIB, ge=MIB)
    """receive slots of one rank, together"""
    digest: Literal["parcel", "full"] = "parcel"
    """`full` also hashes every (layer, block, head) run on both sides and puts both lists into the transfer record"""
    transfer_timeout_s: float = Field(120, gt=0)
    """longest time a transfer may take, from admission; expiry closes it and decode recomputes"""
    lease_s: float = Field(10, gt=0)
    """how long a producer keeps blocks for a consumer it hears nothing from"""


class RouterConfig(_Section):
    """The public server."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    """0 lets the system choose; the chosen one is published"""
    max_body_bytes: int = Field(32 * MIB, ge=1024)
    max_n: int = Field(16, ge=1)
    """largest `n` of one request"""
    max_queued_requests: int = Field(512, ge=1)
    """requests that wait for a pair; at least 32 always fit"""
    ttft_objective_s: float = Field(60, gt=0)
    """bounds the queue: max_queued_tokens = ttft_objective_s × measured prefill tokens/s, with a floor"""
    max_connections: int | None = Field(None, ge=16)
    """clients at once; None takes what the limit on open files allows, which is the most it can be"""
    client_priority: bool = False
    """whether clients may set `priority` (-100 to 100, lower goes first among the requests of one key)"""
    connect_timeout_s: float = Field(2, gt=0)
    first_byte_timeout_s: float = Field(300, gt=0)
    """longest time from a leg's start to its first data; a prefill leg's is its whole answer"""
    idle_timeout_s: float = Field(120, gt=0)
    """longest silence of an engine inside one answer"""
    request_timeout_s: float = Field(600, gt=0)
    """deadline of a request, from admission"""
    disaggregation: Literal["auto", "always", "never"] = "auto"
    """`auto` decides for each request; `always` serves locally only what cannot be disaggregated"""
    local_below_tokens: int = Field(0, ge=0)
    """under `auto`, shorter prompts are served by decode alone"""
    local_prefix_share: float = Field(0.75, gt=0, le=1)
    """under `auto`, a prompt goes to a decode worker alone that holds this share of it"""
    load_failure: Literal["recompute", "fail"] = "recompute"
    """when KV does not arrive: decode computes the prompt, or the request ends with 503 before its first data"""
    resume: bool = False
    """whether a stream whose decode worker is lost goes on at another one. Only greedy chat completions and completions with one choice can, without
    tools, structured output, logprobs, penalties, stop strings or media, at engines without a reasoning parser"""
    debug_headers: bool = False
    """answer with `x-pdserve-receipt`"""
    keys_file: str | None = None
    """API keys; None serves whoever can reach `host`. Read again whenever it changes"""
    allow_open: bool = False
    """whether a `host` that others reach may be served without keys"""
    tenant_cache_salt: Literal["auto", "always", "never"] = "auto"
    """keeps tenants from sharing, and so from probing, each other's prefix cache; `auto` does where there are keys"""
    allow_remote_media: bool = False
    """whether engines may fetch media from URLs that clients name"""
    admin_host: str = "127.0.0.1"
    """where the admin port listens; it wants the deployment's secret, or a key with the scope `admin`"""
    admin_port: int = Field(0, ge=0, le=65535)
    header_timeout_s: float = Field(10, gt=0)
    """from a connection, or a request's first byte, to the end of its header"""
    body_timeout_s: float = Field(60, gt=0)
    """from there to the end of its body"""
    client_idle_timeout_s: float = Field(75, ge=1)
    """how long a connection is kept between requests; longer than clients and load balancers keep theirs"""
    slow_client_timeout_s: float = Field(60, gt=0)
    """how long a client may leave 64 KiB of its answer unread"""
    keepalive_s: float = Field(15, ge=0)
    """pause between comments in a stream that has no data yet; 0 sends none"""

    @field_validator("keys_file")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())


class LimitsConfig(_Section):
    """What one client request may hold, beyond `router.max_body_bytes` and `router.max_n`."""

    max_output_tokens: int | None = Field(None, ge=1)
    """largest output limit of one request, and the limit of one that names none; None leaves it to the model's length"""
    max_json_depth: int = Field(64, ge=8, le=250)
    max_messages: int = Field(4096, ge=1)
    max_tools: int = Field(1024, ge=1)
    max_stop_strings: int = Field(64, ge=1)
    max_headers: int = Field(100, ge=8)
    max_header_bytes: int = Field(32 << 10, ge=1024)
    """of a request's line and headers together"""


class RayConfig(_Section):
    """The cluster under the workers."""

    address: str | None = None
    """joins this cluster; None starts one for this deployment. `RAY_ADDRESS` counts when this is unset."""
    num_cpus_per_worker: float = Field(0.5, gt=0)


class Config(BaseSettings):
    """A whole deployment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix="PDSERVE_",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "default"
    """names the deployment; one of a name runs per user and host"""
    model: str = DEFAULT_MODEL
    """a built-in name or a local folder that vLLM can serve"""
    served_model_name: str | None = None
    """name clients use; None takes the built-in name or the folder's"""
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()
    kv: KvConfig = KvConfig()
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()
    ray: RayConfig = RayConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def home() -> Path:
    """Return the per-user folder for models, run state and logs: `$PDSERVE_HOME`, else XDG's cache folder."""
    explicit = os.environ.get("PDSERVE_HOME")
    if explicit:
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).absolute() / "pdserve"


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read settings from all sources.

    Args:
        path: a YAML file, or None.
        overrides: dotted names from the command line, e.g. ``{"router.port": 9000}``; None values are left out.

    Raises:
        ConfigError: names field, value and fix.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        _merge(tree, _read_yaml(path))
    _merge(tree, _from_environment(os.environ))
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _set(tree, dotted.split("."), value)
    try:
        return Config(**tree)
    except ValidationError as error:
        raise _translate(error) from error


def check_access(router: RouterConfig, field: str = "router.host") -> None:
    """Raise `ConfigError` for a router that anybody could use from elsewhere and that nobody said is meant to be.

    Args:
        field: what the error names.
    """
    if router.keys_file is None and not router.allow_open and not is_loopback(router.host):
        fix = "other hosts reach this address: set router.keys_file (`pdserve keys new`), or router.allow_open to serve without keys"
        raise ConfigError(field, router.host, fix)


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches a server bound there, as far as the name itself tells."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", str(path), f"give a readable YAML file ({error.strerror})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError("--config", str(path), f"mend the YAML syntax{where}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("--config", str(path), "give a mapping of settings at the top level")
    return data


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect `PDSERVE_A__B=value` into a tree; values are read as YAML scalars. `PDSERVE_HOME` is not a setting."""
    tree: dict[str, Any] = {}
    for key, raw in environ.items():
        if key.startswith("PDSERVE_") and key not in RESERVED_ENVIRONMENT:
            _set(tree, key.removeprefix("PDSERVE_").lower().split("__"), yaml.safe_load(raw))
    return tree


RESERVED_ENVIRONMENT = frozenset({"PDSERVE_HOME", "PDSERVE_SECRET", "PDSERVE_WORKER", "PDSERVE_INCARNATION"})
"""variables with our prefix that are not settings: the home folder, and what an engine process is told by its actor"""


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _set(tree: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(".".join(names), value, f"{name} is not a section")
        tree = child
    tree[names[-1]] = value


def _translate(error: ValidationError) -> ConfigError:
    """Turn pydantic's first complaint into field, value, fix."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        return ConfigError(field, first["input"], "unknown setting; `pdserve config schema` lists all")
    fix = first["msg"].removeprefix("Value error, ")
    fix = fix[:1].lower() + fix[1:]
    return ConfigError(field, first["input"], fix.replace("input should be", "give a value that is"))
