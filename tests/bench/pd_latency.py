"""What splitting a request costs it: time to first token and between tokens, through prefill + decode beside the decode engine alone.

    python -m tests.bench.pd_latency [--name default] [--rounds 10] [--output-tokens 32]

Against a running deployment with nothing else to do. The arms take turns on prompts of the same length that no cache holds: through the router, and
straight at the decode engine. Prints one JSON line per prompt length: medians over rounds in ms, and what one prompt moved. On one machine without
GPUs the idle engines spin beside the busy one, so that the figures say little about a fleet.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from pdserve.control.folder import StateFolder
from pdserve.control.state import DeploymentReport, read_report
from pdserve.types import Role

PROMPT_TOKENS = (64, 512, 1500)
TOKEN_IDS = range(100, 40_000)


@dataclass
class Arm:
    """One way to an answer, and how long it took."""

    client: httpx.Client
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    def ask(self, model: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Stream one completion and date its events."""
        body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        dates_s = [time.perf_counter()]
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            self.request_ids.append(answer.headers.get("x-request-id", ""))
            dates_s += [time.perf_counter() for line in answer.iter_lines() if line.startswith('data: {"id"')]
        self.ttft_s.append(dates_s[1] - dates_s[0])
        self.inter_token_s += [after - before for before, after in itertools.pairwise(dates_s[1:])]

    def figures(self) -> dict[str, float]:
        """Return medians, ms."""
        return {
            "ttft_ms": round(statistics.median(self.ttft_s) * 1e3, 1),
            "inter_token_ms": round(statistics.median(self.inter_token_s) * 1e3, 1),
        }


def moved_bytes(admin: httpx.Client, request_ids: Sequence[str]) -> float:
    """Return the median over receipts of what landed at decode."""
    receipts = admin.get("/admin/v1/receipts", params={"limit": 1000}).raise_for_status().json()["receipts"]
    moved = [receipt["receive"]["bytes_moved"] for receipt in receipts if receipt["request_id"] in request_ids and receipt.get("receive")]
    assert len(moved) == len(request_ids), "not every request moved its prompt"
    return statistics.median(moved)


def measure(report: DeploymentReport, admin_url: str, secret: str, rounds: int, output_tokens: int) -> None:
    """Let both arms take turns at every length."""
    decode = next(worker for worker in report.workers if worker.role is Role.DECODE)
    headers = {"x-pdserve-secret": secret}
    with (
        httpx.Client(base_url=report.router.url or "", timeout=300, trust_env=False) as router,
        httpx.Client(base_url=decode.url, headers=headers, timeout=300, trust_env=False) as engine,
        httpx.Client(base_url=admin_url, headers=headers, timeout=30, trust_env=False) as admin,
    ):
        numbers = random.Random(1)
        for length in PROMPT_TOKENS:
            arms = {"disaggregated": Arm(router), "aggregated": Arm(engine)}
            for _ in range(rounds):
                for arm in arms.values():
                    arm.ask(report.model, numbers.choices(TOKEN_IDS, k=length), output_tokens)
            time.sleep(1)
            bytes_moved = moved_bytes(admin, arms["disaggregated"].request_ids)
            print(json.dumps({"prompt_tokens": length, **{name: arm.figures() for name, arm in arms.items()}, "bytes_moved": bytes_moved}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    folder = StateFolder.of(options.name)
    report, binding = read_report(folder.report_path), folder.binding()
    assert report is not None and binding is not None, "no such deployment"
    measure(report, f"http://127.0.0.1:{binding.admin_port}", folder.secret(), options.rounds, options.output_tokens)


if __name__ == "__main__":
    main()
