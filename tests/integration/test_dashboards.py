"""Every panel of every dashboard is answered by a real Prometheus that scrapes a real router under traffic."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pdserve.testing.fake_worker import KV_BYTES_PER_TOKEN

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
SAMPLE_CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
SCRAPE_INTERVAL = "200ms"
RATE_INTERVAL = "5s"
ANSWER_TIMEOUT_S = 30
TRAFFIC = Path(__file__).with_name("router_traffic.py")
SERIES = re.compile(r"\b(?:pdserve|process)_\w+")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    where: str
    expression: str


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """Return every expression of every dashboard, variables filled in as Grafana does for `All`."""
    found = []
    for dashboard in DASHBOARDS:
        variables = {"__rate_interval": RATE_INTERVAL}
        for variable in json.loads(dashboard.read_text(encoding="utf-8"))["templating"]["list"]:
            variables[variable["name"]] = variable.get("allValue") or str(variable["query"])
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expression = fill(target["expr"], variables)
                found.append(Query(f"{dashboard.name}: {panel['title']} {target['refId']}", expression))
    return found


def fill(expression: str, variables: Mapping[str, str]) -> str:
    """Replace `$name` and `${name}`. Raises KeyError for a variable that the dashboard does not define."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], expression)


@pytest.fixture(scope="module")
def router_port() -> Iterator[int]:
    """Port of a real router that serves requests of every kind until the module ends."""
    with subprocess.Popen([sys.executable, TRAFFIC], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()
    assert process.returncode == 0


@contextmanager
def running_prometheus(folder: Path, target_port: int) -> Iterator[httpx.Client]:
    """Run Prometheus with the sample configuration, pointed at `target_port` and sped up; yields a client for its API."""
    binary = shutil.which("prometheus")
    assert binary is not None, "prometheus is not on PATH; `make test` fetches it"
    config = yaml.safe_load(SAMPLE_CONFIG.read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = config["global"]["scrape_timeout"] = SCRAPE_INTERVAL
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{target_port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0"]
    with (folder / "log").open("wb") as log, subprocess.Popen([binary, *arguments], cwd=folder, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{_listening_port(process)}/api/v1/", timeout=10) as client:
                yield client
        finally:
            process.terminate()


def _listening_port(process: subprocess.Popen[bytes]) -> int:
    return eventually(
        lambda: next((c.laddr.port for c in psutil.Process(process.pid).net_connections("tcp") if c.status == "LISTEN"), None)
    )


def eventually(ask: Callable[[], Answer | None]) -> Answer:
    """Return the first answer that is not None within `ANSWER_TIMEOUT_S`."""
    give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
    while (answer := ask()) is None:
        assert time.monotonic() < give_up_at, "no answer in time"
        time.sleep(0.1)
    return answer


@pytest.fixture(scope="module")
def prometheus(router_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the router."""
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), router_port) as client:
        yield client


def finite_values(client: httpx.Client, expression: str) -> list[float] | None:
    """Return the values of an instant query; None while there are none, or while one is not a number yet."""
    response = client.get("query", params={"query": expression})
    assert response.status_code == 200, response.text
    values = [float(sample["value"][1]) for sample in response.json()["data"]["result"]]
    return values if values and all(map(math.isfinite, values)) else None


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.where)
def test_panel_query_is_answered(prometheus: httpx.Client, query: Query) -> None:
    """Each query of each panel yields series, and every one has a finite value."""
    assert eventually(lambda: finite_values(prometheus, query.expression))


def test_rates_follow_the_traffic(prometheus: httpx.Client) -> None:
    """The transfer panels show what the engines' records say, not merely something: the fake's bytes per prompt token."""
    ratio = "sum(rate(pdserve_kv_transfer_bytes_total[5s])) / sum(rate(pdserve_kv_transfer_tokens_total[5s]))"
    assert eventually(lambda: finite_values(prometheus, ratio)) == [pytest.approx(KV_BYTES_PER_TOKEN)]


def test_variables_find_the_router(prometheus: httpx.Client) -> None:
    """The series behind the job and instance variables exists under the sample's job name."""
    series = eventually(lambda: prometheus.get("series", params={"match[]": "pdserve_build_info"}).json()["data"] or None)
    assert [labels["job"] for labels in series] == ["pdserve"]


def test_queries_name_series_that_the_router_has(router_port: int) -> None:
    """No panel and no variable asks for a series that the router's /metrics does not show."""
    text = httpx.get(f"http://127.0.0.1:{router_port}/metrics").text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    asked = {name for dashboard in DASHBOARDS for name in SERIES.findall(dashboard.read_text(encoding="utf-8"))}
    assert asked
    assert asked <= known


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_panels_tell_what_they_show(dashboard: Path) -> None:
    """Each panel has a unit, thresholds, a description and the chosen data source; ids are unique and the dashboard's uid is its file's."""
    board = json.loads(dashboard.read_text(encoding="utf-8"))
    assert board["uid"] == f"pdserve-{dashboard.stem}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels(dashboard):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        assert len(panel["description"]) > 40, panel["title"]
        assert {source["datasource"]["uid"] for source in (panel, *panel["targets"])} == {"${datasource}"}, panel["title"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap(dashboard: Path) -> None:
    """No two panels claim the same cell of Grafana's 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_sample_configuration_is_valid() -> None:
    """Prometheus' own checker accepts the scrape configuration that the repository offers."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is not on PATH; `make test` fetches it"
    subprocess.run([promtool, "check", "config", SAMPLE_CONFIG], check=True, capture_output=True)
